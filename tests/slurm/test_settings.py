"""The slurm section of a profile: what it refuses, and in which words."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from llmtrain.config import slurm
from llmtrain.config.job import check

PROFILE = """
name: bed
nodes: 2
gpus_per_node: 4
accelerator: cpu
intra_node: {kind: shared-memory}
inter_node: {data: {kind: tcp}, control: {kind: tcp}}
storage: {path: /shared/runs, bandwidth: 500 MB/s}
backend:
  kind: slurm
  slurm:
"""

BAD = [
    ("time: 30s", "less than Slurm's shortest"),
    ("time: tomorrow", "duration"),
    ("{time: 10m, signal_seconds: 600}", "does not fit into 600 s"),
    ("signal: KILL", "one of USR1, USR2"),
    ("signal_seconds: 0", ">= 1"),
    ("signal_seconds: 70000", "<= 65535"),
    ("chain: ring", "one of none, singleton, array"),
    ("chain_length: 5", "needs a kind of chain"),
    ("partition: \"a\\nb\"", "one line"),
    ("comment: \"a\\u2028b\"", "one line"),
    ("job_name: two words", "letters, digits"),
    ("job_name: -x;y", "letters, digits"),
    ("cpus_per_task: 0", ">= 1"),
    ("requeue: sometimes", "true or false"),
    ("requeue_limit: -1", ">= 0"),
    ("export: PATH", "one of all, none"),
    ("extra: {nodes: 3}", "`--nodes` is set by llmtrain"),
    ("extra: {partition: x}", "`--partition` is set by llmtrain"),
    ("extra: {wait-all-nodes: 1}", "use `backend.slurm.wait_all_nodes`"),
    ("extra: {--licenses: x}", "not the name of a directive"),
    ("extra: {\"a b\": x}", "not the name of a directive"),
    ("extra: {licenses: \"a\\nb\"}", "one line"),
    ("srun_args: [--nodes=3]", "set by llmtrain for every agent"),
    ("srun_args: [-w, node1]", "set by llmtrain for every agent"),
    ("srun_args: [bash]", "not an option"),
    ("modules: [-x]", "starts with a dash"),
    ("container: {kind: docker, image: x}", "one of pyxis, apptainer"),
    ("container: {kind: pyxis}", "image"),
    ("container: {kind: pyxis, image: ''}", "has no image"),
    ("container: {kind: pyxis, image: --help}", "starts with a dash"),
    ("container: {kind: pyxis, image: x, mounts: [relative:/a]}", "not a mount"),
    ("container: {kind: pyxis, image: x, mounts: [\"/a:/b,/c:/d\"]}", "not a mount"),
    ("timeout: 0", ">= 1"),
    ("partitoin: gpu", "did you mean `partition`?"),
    ("[gpu]", "mapping"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), BAD, ids=[text for text, _ in BAD])
def test_bad_settings_are_named_with_file_and_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(f"{PROFILE}    {text}\n")
    problems = check("tiny", str(path))
    texts = "\n".join(problem.text() for problem in problems)
    assert words in texts
    assert re.search(rf"{re.escape(str(path))}:\d+", texts)


def test_the_section_needs_its_backend(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(f"{PROFILE}    partition: gpu\n".replace("kind: slurm", "kind: local"))
    [problem] = check("tiny", str(path))
    assert "backend.slurm means nothing with backend.kind = local" in problem.message


def test_a_profile_without_the_section_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(PROFILE.replace("  slurm:\n", ""))
    assert check("tiny", str(path)) == []


@pytest.mark.parametrize("cls", [slurm.SlurmConfig, slurm.ContainerConfig])
def test_every_field_has_a_docstring(cls: type) -> None:
    source = Path(slurm.__file__).read_text()
    for field in dataclasses.fields(cls):
        declared = re.search(rf"^    {field.name}: [^\n]*\n    \"\"\"[A-Z`]", source, re.MULTILINE)
        assert declared, f"{cls.__name__}.{field.name}"
