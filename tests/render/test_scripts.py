"""Rendered scripts: golden files, quoting proved by running bash, strictness, purity, speed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import jinja2
import pytest

from llmtrain import __version__, resources
from llmtrain.config.cluster import EnvironmentConfig
from llmtrain.config.job import check, resolve
from llmtrain.config.layout import Layout
from llmtrain.errors import ConfigError
from llmtrain.render.environment import environment, quoted
from llmtrain.render.scripts import render, render_scripts
from llmtrain.run.job_file import JobFile, read_job_file
from llmtrain.run.layout import RunDir

GOLDEN = Path(__file__).parent / "golden"
RECIPES = [path.stem for path in resources.shipped("recipes")]
PROFILES = [path.stem for path in resources.shipped("cluster_profiles")]
UPDATE = "LLMTRAIN_UPDATE_GOLDEN"

HOSTILE = {
    "spaces": "a b  c",
    "single quotes": "it's 'quoted'",
    "double quotes": 'say "hi"',
    "newlines": "one\ntwo\n",
    "substitution": "$(touch pwned) `touch pwned` $HOME ${HOME}",
    "separators": "a;touch pwned & b | c > pwned",
    "glob": "* ? [a-z] ~ {a,b}",
    "backslashes": "\\n \\\\ \\",
    "leading dash": "--rm -rf",
    "unicode": "Gr\u00fc\u00dfe \u4e16\u754c \U0001f600",
    "comment": "# not a comment",
    "history": "!! !$",
    "empty": "",
    "jinja": "{{ 7 * 7 }} {% raw %}",
    "control": "\x01\x1b[31m\t\r",
}


def make_job(recipe: str, profile: str, run_id: str = "run-1") -> JobFile:
    spec = resolve(recipe, profile)
    return JobFile(run_id=run_id, version=__version__, spec=spec, layout=Layout())


def with_environment(job: JobFile, **fields: object) -> JobFile:
    environment_config = EnvironmentConfig(**fields)  # type: ignore[arg-type]
    cluster = dataclasses.replace(job.spec.cluster, environment=environment_config)
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, cluster=cluster))


def pairs() -> list[tuple[str, str]]:
    """Shipped recipes x profiles that fit together (a tensor-parallel group needs one node, and so on)."""
    every = [(recipe, profile) for recipe in RECIPES for profile in PROFILES]
    return [pair for pair in every if not check(*pair)]


@pytest.mark.parametrize(("recipe", "profile"), pairs())
def test_golden(recipe: str, profile: str) -> None:
    """After a wanted change: LLMTRAIN_UPDATE_GOLDEN=1 pytest tests/render, and read the diff."""
    job = make_job(recipe, profile)
    files = render_scripts(job, RunDir(Path("/shared/runs/run-1")), python="/opt/venv/bin/python").files
    assert {"scripts/env.sh", "scripts/node.sh"} <= set(files)
    folder = GOLDEN / f"{recipe}--{profile}"
    if os.environ.get(UPDATE):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / Path(name).name).write_text(text)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        Path(name).name: text for name, text in files.items()
    }
    assert all(text.endswith("\n") for text in files.values())


def test_no_golden_folder_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{recipe}--{profile}" for recipe, profile in pairs()}


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("*/*.sh")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_bash_accepts_every_script(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed (Debian package `shellcheck`)")
    scripts = [str(path) for path in sorted(GOLDEN.glob("*/*.sh"))]
    # SC2148: env.sh is sourced and has no interpreter line. SC1091: it is not at its place here.
    options = ["--shell=bash", "--severity=warning", "--exclude=SC2148,SC1091"]
    done = subprocess.run([program, *options, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def run_node_script(
    tmp_path: Path, job: JobFile, folder: str, python: str = "python", **environment: str
) -> tuple[list[str], dict[str, str]]:
    """Run the rendered node script with a stand-in for Python; its arguments and environment."""
    run = RunDir(tmp_path / folder)
    fake = tmp_path / "bin" / python
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(
        "#!/usr/bin/env python3\n"
        "import json, os, sys\n"
        "json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['OUT'], 'w'))\n"
    )
    fake.chmod(0o755)
    for name, text in render_scripts(job, run, python=str(fake)).files.items():
        path = run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    out = tmp_path / "out.json"
    done = subprocess.run(
        ["bash", str(run.scripts / "node.sh"), "3", "1", "4", "2", "10.0.0.1", "29400"],
        env={"PATH": os.environ["PATH"], "OUT": str(out), "HOME": str(tmp_path), **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "pwned").exists()
    arguments, variables = json.loads(out.read_text())
    return arguments, variables


def test_arguments_of_torchrun(tmp_path: Path) -> None:
    arguments, variables = run_node_script(tmp_path, make_job("tiny", "local"), "run-1")
    assert arguments == [
        "-m",
        "torch.distributed.run",
        "--nnodes=4",
        "--node-rank=1",
        "--nproc-per-node=2",
        "--rdzv-backend=static",
        "--rdzv-id=run-1.3",
        "--master-addr=10.0.0.1",
        "--master-port=29400",
        "--max-restarts=0",
        "-m",
        "llmtrain.engine",
        str(tmp_path / "run-1" / "job.json"),
    ]
    assert variables["PYTHONUNBUFFERED"] == "1"
    assert variables["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert "PYTHONPATH" not in variables and "ranks_on_node" not in variables


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_values_stay_data(tmp_path: Path, value: str) -> None:
    job = with_environment(make_job("tiny", "local"), variables={"HOSTILE": value, "AFTER": "still here"})
    _, variables = run_node_script(tmp_path, job, "run-1")
    assert variables["HOSTILE"] == value
    assert variables["AFTER"] == "still here"


@pytest.mark.parametrize(
    "name", [text for text in HOSTILE.values() if text and "/" not in text], ids=lambda text: ascii(text)[:20]
)
def test_hostile_run_folders_and_ids_stay_data(tmp_path: Path, name: str) -> None:
    job = dataclasses.replace(make_job("tiny", "local"), run_id=name)
    arguments, _ = run_node_script(tmp_path, job, name, python=f"py {name}"[:40].replace("/", ""))
    assert f"--rdzv-id={name}.3" in arguments
    assert arguments[-1] == str(tmp_path / name / "job.json")


def test_profile_wins_over_what_the_template_sets(tmp_path: Path) -> None:
    variables = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9"}
    job = with_environment(make_job("tiny", "local"), variables=variables)
    _, seen = run_node_script(tmp_path, job, "run-1")
    assert {name: seen[name] for name in variables} == variables


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, "/a b:$(touch pwned)"), ({"PYTHONPATH": ""}, "/a b:$(touch pwned)"),
     ({"PYTHONPATH": "/own:/'other"}, "/a b:$(touch pwned):/own:/'other")],
)  # fmt: skip
def test_pythonpath_is_added_to_and_never_replaced(
    tmp_path: Path, before: dict[str, str], after: str
) -> None:
    job = with_environment(make_job("tiny", "local"), variables={"PYTHONPATH": "/a b:$(touch pwned)"})
    _, seen = run_node_script(tmp_path, job, "run-1", **before)
    assert seen["PYTHONPATH"] == after
    _, seen = run_node_script(tmp_path, make_job("tiny", "local"), "run-2", **before)
    assert seen.get("PYTHONPATH") == before.get("PYTHONPATH")


@pytest.mark.parametrize("name", ["A B", "1A", "A-B", "A=1;touch pwned", "", "A\nB", "\u00c4"])
@pytest.mark.parametrize("place", ["variables", "pass_through"])
def test_what_is_no_variable_name_is_refused(name: str, place: str) -> None:
    value = {name: "x"} if place == "variables" else (name,)
    job = with_environment(make_job("tiny", "local"), **{place: value})
    with pytest.raises(ConfigError, match="is no name of a variable"):
        render_scripts(job, RunDir(Path("/r")), python="python")


def test_nul_bytes_are_refused() -> None:
    job = with_environment(make_job("tiny", "local"), variables={"A": "x\0y"})
    with pytest.raises(ConfigError, match="NUL byte"):
        render_scripts(job, RunDir(Path("/r")), python="python")


def test_values_of_secrets_are_not_in_any_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-value")
    job = with_environment(make_job("tiny", "local"), pass_through=("MY_TOKEN",))
    files = render(job, {}, RunDir(Path("/r")), python="python").files
    assert "MY_TOKEN" in files["scripts/env.sh"]
    assert not any("s3cr3t-value" in text for text in files.values())


def test_misspelt_names_in_templates_are_errors() -> None:
    with pytest.raises(jinja2.UndefinedError):
        environment().from_string("{{ pyhton }}").render(python="x")


@pytest.mark.parametrize("value", [None, True, 1.5, ["a"], {"a": 1}])
def test_only_texts_and_integers_can_be_put_out(value: object) -> None:
    with pytest.raises(TypeError):
        quoted(value)


def test_every_template_output_is_one_shell_word() -> None:
    text = environment().from_string("x={{ value }}").render(value="a b'c")
    done = subprocess.run(
        ["bash", "-c", f'{text}; printf %s "$x"'], capture_output=True, text=True, check=False
    )
    assert done.stdout == "a b'c"


def test_rendering_is_pure() -> None:
    job = make_job("tiny", "local")
    first = render(job, {"schema": 1}, RunDir(Path("/r/run-1")), python="/p")
    again = render(job, {"schema": 1}, RunDir(Path("/r/run-1")), python="/p")
    assert first == again


def test_job_json_reads_back(tmp_path: Path) -> None:
    job = make_job("tiny", "local")
    text = render(job, {}, RunDir(tmp_path), python="/p").files["job.json"]
    (tmp_path / "job.json").write_text(text)
    assert read_job_file(tmp_path / "job.json") == job


def test_rendering_for_32_nodes_takes_under_a_second() -> None:
    job = make_job("gpt-175b", "a100-32x8")
    began = time.process_time()
    render(job, {}, RunDir(Path("/r/run-1")), python="/p")
    assert time.process_time() - began < 1.0
