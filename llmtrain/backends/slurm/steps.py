"""What the steps of a job are started with, in or out of a container. Pure."""

from __future__ import annotations

from dataclasses import replace

from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.slurm import slurm_config
from llmtrain.transport.srun import StepSettings


def step_settings(cluster: ClusterProfile, job: str, *, bind: bool, storage: str) -> StepSettings:
    """Settings of all steps of a job; `bind`: this SLURM binds tasks, `storage`: what containers must see."""
    config = slurm_config(cluster.backend.slurm)
    container, settings = config.container, StepSettings(job=job, bind=bind)
    if container is None:
        return replace(settings, arguments=config.srun_args)
    mounts = (f"{storage}:{storage}", *container.mounts)
    if container.kind == "pyxis":
        home = "--container-mount-home" if container.mount_home else "--no-container-mount-home"
        own = (f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}", home)
        return replace(settings, arguments=(*config.srun_args, *own, *container.arguments))
    binds = [word for mount in mounts for word in ("--bind", mount)]
    flags = [] if container.mount_home else ["--no-home"]
    if cluster.accelerator != "cpu":
        flags.append("--nv")
    wrapper = ("apptainer", "exec", *flags, *binds, *container.arguments, container.image)
    return replace(settings, arguments=config.srun_args, wrapper=wrapper)
