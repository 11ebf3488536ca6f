"""The slurm section of a profile: what it refuses, and in which words."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from llmtrain.backends.slurm.setup_lines import unreadable_setup
from llmtrain.cli import main as cli
from llmtrain.config import slurm
from llmtrain.config.job import check
from llmtrain.errors import Problem

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
    ("extra: {nice: }", 'hint: for an empty text write ""'),
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


@pytest.mark.parametrize(("path", "words"), [('"/a\\nb"', "a line break"), ("/a\\b", "a backslash")])
def test_storage_that_no_directive_can_name(path: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(PROFILE.replace("/shared/runs", path))
    [problem] = check("tiny", str(file))
    assert (problem.where, words in problem.message) == (f"{file}:8", True), problem.text()
    assert "\n" not in problem.message


def test_a_long_value_is_not_echoed_whole(tmp_path: Path) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(f"{PROFILE}    modules: [-{'x' * 1500}]\n")
    [problem] = check("tiny", str(file))
    assert len(problem.text()) < 600 and "...` starts with a dash" in problem.message


def test_what_stands_between_two_values_is_told_whole() -> None:
    said = f"`sbatch` said: {'no ' * 100}; look at `squeue` for more"
    assert Problem("", said).message == said


SETUP = [
    ((), None),
    (("source /opt/venv/bin/activate", "if [ -d /scratch ]; then", "  export TMPDIR=/scratch", "fi"), None),
    (("export A=1", "if true; then", "export B=2"), 2),
    (("export A=1", "fi", "export B=2"), 1),
    (("echo 'open",), 0),
    (("cat <<EOF", "text"), 1),
    (("(a", "b))"), 1),
    (("export A=1 \\",), 0),
    (("echo a\\\\",), None),
    (("echo \u00e9 $(",), 0),
    (("shopt -s extglob", "rm -f !(a)"), None),
    (("if !(false); then", "shopt -s extglob", "fi"), None),
    (("make all &>> log |& tee", "# as before \\"), None),
    (("export A='b' # as before \\",), None),
    (("echo '#' $# a#b \\",), 0),
    (("export A=\udce9\ud800",), None),
    (("export A=\udce9\ud800", "done \u65e5"), 1),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "wrong"), SETUP, ids=[ascii(" | ".join(lines)) for lines, _ in SETUP])
def test_setup_that_bash_cannot_read_is_found_where_one_launches(
    lines: tuple[str, ...], wrong: int | None
) -> None:
    found = [problem.where for problem in unreadable_setup(lines)]
    assert found == ([] if wrong is None else [f"backend.slurm.setup.{wrong}"])


def test_a_bash_that_is_too_old_has_no_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none that speaks Latin-1 is one that fails."""
    old = tmp_path / "bash"
    script = 'case $1 in -c) echo 3 ;; *) printf "line 1: near \\351\\n" >&2; exit 2 ;; esac'
    old.write_text(f"#!/bin/sh\n{script}\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert unreadable_setup(["make &>> log"]) == []
    old.write_text(old.read_text().replace("echo 3", "echo 4"))
    [problem] = unreadable_setup(["make &>> log"])
    assert problem.message == "bash cannot read it: near \ufffd"


def test_a_dry_run_names_the_line_of_the_setup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(f"{PROFILE}    setup:\n      - export A=1\n      - done\n")
    assert cli.run(["launch", "tiny", "--cluster", str(file), "--dry-run"]) == 2
    assert f"{file}:14: backend.slurm.setup.1: bash cannot read it: syntax error" in capsys.readouterr().err


@pytest.mark.parametrize("cls", [slurm.SlurmConfig, slurm.ContainerConfig])
def test_every_field_has_a_docstring(cls: type) -> None:
    source = Path(slurm.__file__).read_text()
    for field in dataclasses.fields(cls):
        declared = re.search(rf"^    {field.name}: [^\n]*\n    \"\"\"[A-Z`]", source, re.MULTILINE)
        assert declared, f"{cls.__name__}.{field.name}"
