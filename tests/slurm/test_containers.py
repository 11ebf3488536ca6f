"""Agents and ranks in containers: what is rendered goes through strict stand-in runtimes, on real nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.config.load import load_profile
from llmtrain.errors import ConfigError
from llmtrain.run.layout import RunDir
from tests.support import containers, shadow_torch
from tests.support.launches import sets
from tests.support.slurm_beds import SlurmBed

IMAGE = "an $(touch pwned) im'age \" `x`"
SECRET = "s3cr3t-7041 $x"
ODD = "a 'b' $(touch pwned)"


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["apptainer", "pyxis"])
def test_ranks_see_what_is_mounted_and_nothing_else(
    kind: str,
    slurm_bed: SlurmBed,
    profile: Path,
    shared: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = containers.install(shared / "bin", sys.executable)
    shadow = shadow_torch.install(shared / "shadow", tell="INSIDE BED_TOKEN ODD", steps=2)
    (shared / IMAGE).touch()
    monkeypatch.setenv("PATH", f"{shared / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("BED_TOKEN", SECRET)
    run = RunDir(shared / "runs" / "we ird $(touch pwned) 'q'")
    mounts = [f"{corpus}:{corpus}:ro", f"{shadow}:{shadow}"]
    container = {"kind": kind, "image": str(shared / IMAGE), "mounts": mounts, "python": sys.executable}
    settings = [
        *shadow_torch.overrides(shadow, corpus),
        f"cluster.backend.slurm.container={json.dumps(container)}",
        "cluster.environment.pass_through=[BED_TOKEN]",
        f"cluster.environment.variables.ODD={json.dumps(ODD)}",
    ]
    command = ["launch", "tiny", "--cluster", str(profile), "--run-dir", str(run.path), *sets(*settings)]
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", *command], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr + run.supervisor_log.read_text()
    parts = sorted({path.relative_to("/tmp").parts[0] for path in (shared, corpus, *containers.IN_IMAGE)})
    inside = {"INSIDE": str(shared / IMAGE), "BED_TOKEN": SECRET, "ODD": ODD, "/tmp": parts}
    assert shadow_torch.told(shadow) == {str(node): inside for node in range(4)}
    assert not list(shared.rglob("pwned"))
    made = containers.calls(record, "apptainer" if kind == "apptainer" else "srun")
    mounts = [f"{run.path.parent}:{run.path.parent}", *mounts]
    for words in made:
        assert SECRET not in " ".join(words)
        if kind == "apptainer":
            binds = [word for mount in mounts for word in ("--bind", mount)]
            assert words[:9] == ["exec", "--no-home", *binds, str(shared / IMAGE)]
        else:
            assert f"--container-image={shared / IMAGE}" in words
            assert f"--container-mounts={','.join(mounts)}" in words
    assert sum("llmtrain.agent" in words for words in made) == 4


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_a_folder_that_no_mount_can_name_is_refused(name: str, tmp_path: Path) -> None:
    container = '{kind: pyxis, image: "/x.sqsh"}'
    options = [f"storage.path=/shared/{name}", f"backend.slurm.container={container}"]
    with pytest.raises(ConfigError, match="cannot be mounted"):
        load_profile("a100-32x8", options)
