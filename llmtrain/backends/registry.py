"""Backends by name, loaded when they are used, so that paramiko costs only those who need it."""

from __future__ import annotations

from importlib import import_module

from llmtrain.backends.base import Backend
from llmtrain.config.cluster import ClusterProfile
from llmtrain.errors import ConfigError, Problem

BACKENDS: dict[str, str] = {
    "local": "llmtrain.backends.local:LocalBackend",
    "ssh": "llmtrain.backends.ssh:SshBackend",
    "slurm": "llmtrain.backends.slurm.backend:SlurmBackend",
}
"""`backend.kind` of a profile -> module:class."""


def load_backend(cluster: ClusterProfile) -> Backend:
    """The backend of a profile; raises ConfigError for a kind that cannot launch."""
    kind = cluster.backend.kind
    if kind not in BACKENDS:
        message = f"the backend `{kind}` can be planned for, but not launched on"
        raise ConfigError([Problem("backend.kind", message, f"launchable: {', '.join(BACKENDS)}")])
    module, name = BACKENDS[kind].split(":")
    backend: Backend = getattr(import_module(module), name)(cluster)
    return backend
