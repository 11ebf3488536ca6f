"""The batch script: a golden file with every field, sbatch's own quoting, the shell around the supervisor."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from llmtrain import __version__
from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.errors import ConfigError
from llmtrain.render.scripts import render_scripts
from llmtrain.render.slurm import SUPERVISOR_STARTS, nodes_wanted, render_slurm, sbatch_word, time_limit
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from tests.support.slurm_beds import SlurmBed

GOLDEN = Path(__file__).parent / "golden" / "every-field.sh"
UPDATE = "LLMTRAIN_UPDATE_GOLDEN"

EVERY_FIELD = """
name: every-field
nodes: 5
spares: 1
gpus_per_node: 2
accelerator: a100-80g-sxm
intra_node: {kind: nvlink3}
inter_node: {data: {kind: ib-hdr}, control: {kind: tcp}}
storage: {path: /shared/runs, bandwidth: 1 GB/s}
environment: {pass_through: [WANDB_API_KEY, HF_HOME]}
backend:
  kind: slurm
  python: /opt/train/bin/python
  slurm:
    partition: gpu,big
    account: project 7
    qos: high
    reservation: maint#1
    time: 2-12:30:00
    constraint: "a100&nvlink"
    nodelist: "node[01-04]"
    exclude: node09
    switches: "1@30:00"
    exclusive: true
    gres: gpu:a100:2
    cpus_per_task: 64
    mem: 480G
    hint: nomultithread
    job_name: my-job
    comment: it's "a" comment with \\ and $(date)
    wckey: key
    mail_type: END,FAIL
    mail_user: someone@example.org
    signal: USR2
    signal_seconds: 600
    requeue: false
    chain: array
    chain_length: 10
    dependency: afterok:12
    export: none
    modules: [cuda/12.4, "odd name"]
    setup: ["source /opt/train/env.sh", "ulimit -l unlimited"]
    extra: {licenses: "matlab:1", contiguous: ""}
    srun_args: [--mpi=none]
"""

HOSTILE = {
    "spaces": " a b  c ",
    "single quotes": "it's 'quoted'",
    "double quotes": 'say "hi"',
    "substitution": "$(touch pwned) `touch pwned` $HOME ${HOME}",
    "separators": "a;touch pwned & b | c > pwned",
    "glob": "* ? [a-z] ~ {a,b}",
    "backslashes": "\\n \\\\ \\",
    "leading dash": "--rm -rf",
    "unicode": "Gr\u00fc\u00dfe \u4e16\u754c \U0001f600",
    "comment": "a # not a comment",
    "option": "x --partition=debug",
    "percent": "%j %% %x",
    "jinja": "{{ 7 * 7 }} {% raw %}",
}


def job_of(text: str, folder: Path, *overrides: str, run_id: str = "run-1", **layout: int) -> JobFile:
    path = folder / "profile.yaml"
    path.write_text(text)
    spec = resolve("tiny", str(path), overrides)
    return JobFile(run_id=run_id, version=__version__, spec=spec, layout=Layout(**layout))


def script_of(tmp_path: Path, *overrides: str) -> str:
    job = job_of(EVERY_FIELD, tmp_path, *overrides, dp=4, tp=2, pp=1)
    return render_scripts(job, RunDir(Path("/shared/runs/run-1")), python="/usr/bin/python3").files[
        "scripts/slurm.sh"
    ]


def test_every_field_as_in_the_golden_file(tmp_path: Path) -> None:
    text = script_of(tmp_path)
    if os.environ.get(UPDATE):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), f"if the change is meant: {UPDATE}=1"


@pytest.mark.parametrize(
    "override",
    [
        "requeue=true",
        "chain=singleton",
        "signal=TERM",
        "export=all",
        "modules=[]",
        "setup=[]",
        "gres=none",
        "mem=''",
    ],
)
def test_scripts_are_sound_bash(tmp_path: Path, override: str) -> None:
    script = tmp_path / "slurm.sh"
    script.write_text(script_of(tmp_path, f"cluster.backend.slurm.{override}"))
    subprocess.run(["bash", "-n", script], check=True)
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed (Debian package `shellcheck`)")
    # SC1091: files of the cluster that are not here.
    done = subprocess.run([program, "--exclude=SC1091", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_directive_has_its_reason(tmp_path: Path) -> None:
    lines = script_of(tmp_path).splitlines()
    directives = [index for index, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(directives) > 30
    for index in directives:
        assert lines[index - 1].startswith("# ") and lines[index - 1].endswith(".")


def test_a_job_asks_for_what_its_layout_and_spares_need(tmp_path: Path) -> None:
    assert nodes_wanted(job_of(EVERY_FIELD, tmp_path, dp=4, tp=2, pp=1)) == 5
    assert nodes_wanted(job_of(EVERY_FIELD, tmp_path, dp=2, tp=2, pp=1)) == 3
    assert nodes_wanted(job_of(EVERY_FIELD, tmp_path, dp=5, tp=2, pp=1)) == 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(60, "0-00:01:00"), (86400, "1-00:00:00"), (90061.2, "1-01:01:02"), (216000 + 1800, "2-12:30:00")],
)
def test_time_limits(seconds: float, text: str) -> None:
    assert time_limit(seconds) == text


@pytest.mark.parametrize("character", ["\n", "\r", "\0", "\x1b", "\u2028", "\x85"])
def test_control_characters_are_refused_everywhere(character: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="control character"):
        sbatch_word(f"a{character}b")
    run = RunDir(Path(f"/shared/a{character}b/run-1"))
    with pytest.raises(ConfigError):
        render_slurm(job_of(EVERY_FIELD, tmp_path, dp=1), run, python="python")


def test_a_backslash_in_the_runs_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="backslash"):
        render_slurm(job_of(EVERY_FIELD, tmp_path, dp=1), RunDir(Path("/a\\b/run-1")), python="python")


@pytest.mark.e2e
def test_sbatch_reads_hostile_values_as_they_are(slurm_bed: SlurmBed, tmp_path: Path) -> None:
    """Of every value, what SLURM has stored; one that ends a word or a line would change or stop the job."""
    for name, value in HOSTILE.items():
        script = tmp_path / "script.sh"
        script.write_text(
            "#!/bin/bash\n#SBATCH --hold\n#SBATCH --output=/dev/null\n"
            f"#SBATCH --comment={sbatch_word(value)}\n#SBATCH --job-name=after\ntrue\n"
        )
        job = slurm_bed.slurm("sbatch", "--parsable", str(script)).strip()
        shown = slurm_bed.slurm("squeue", "-h", "-j", job, "-O", "Name:\t,Comment:\t")
        slurm_bed.slurm("scancel", job)
        assert shown.rstrip("\n").split("\t")[:2] == ["after", value], name


# ---- what the shell does, with a shell script in the place of Python
STUB = """#!/bin/bash
echo "$*" >>"{folder}/calls"
case "$*" in
  *slurm.end*) exit 0 ;;
  *supervise*) {supervise} ;;
esac
"""


class Shell:
    """A rendered batch script and the stand-in that it calls."""

    def __init__(self, folder: Path, supervise: str, *overrides: str) -> None:
        self.folder = folder
        python = folder / "python"
        python.write_text(STUB.format(folder=folder, supervise=supervise))
        python.chmod(0o755)
        minimal = EVERY_FIELD[: EVERY_FIELD.index("    partition")] + "    qos: x\n"
        job = job_of(minimal.replace("/opt/train/bin/python", str(python)), folder, *overrides, dp=1)
        self.script = folder / "slurm.sh"
        self.script.write_text(render_slurm(job, RunDir(folder), python=str(python)))

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def calls(self, word: str) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if word in line]

    def wait_for_supervisor(self) -> None:
        deadline = time.monotonic() + 10
        while not self.calls("supervise"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)


@pytest.mark.parametrize("status", [0, 1, 2, 3, 75, 93])
def test_the_exit_code_is_the_supervisors(tmp_path: Path, status: int) -> None:
    shell = Shell(tmp_path, f"exit {status}")
    process = shell.start()
    assert process.wait(20) == status
    assert len(shell.calls("supervise")) == 1
    assert [call.split()[-3:] for call in shell.calls("slurm.end")] == [
        ["--status", str(status), str(tmp_path)]
    ]


def test_a_supervisor_that_is_killed_is_started_again_but_not_for_ever(tmp_path: Path) -> None:
    shell = Shell(tmp_path, "kill -KILL $$")
    process = shell.start()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 137
    assert len(shell.calls("supervise")) == SUPERVISOR_STARTS
    assert errors.count("the supervisor died with exit code 137") == SUPERVISOR_STARTS


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_warning_reaches_the_supervisor_and_its_exit_code_counts(
    tmp_path: Path, number: signal.Signals
) -> None:
    shell = Shell(tmp_path, "trap 'sleep 0.5; exit 75' TERM; while :; do sleep 0.05; done")
    process = shell.start()
    shell.wait_for_supervisor()
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    assert process.wait(20) == 75
    assert len(shell.calls("supervise")) == 1


def test_a_warning_before_the_supervisor_listens_is_an_early_stop(tmp_path: Path) -> None:
    shell = Shell(tmp_path, "exec sleep 30")
    process = shell.start()
    shell.wait_for_supervisor()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 75
    assert len(shell.calls("supervise")) == 1
    assert "--status 75" in shell.calls("slurm.end")[0]


def test_a_missing_interpreter_ends_with_two(tmp_path: Path) -> None:
    shell = Shell(tmp_path, "exit 0")
    (tmp_path / "python").unlink()
    process = shell.start()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert f"there is no {tmp_path}/python on this node" in errors and "backend.python" in errors


def test_set_up_runs_first_and_a_failure_names_the_command(tmp_path: Path) -> None:
    setup = "cluster.backend.slurm.setup=[export SEEN=yes, 'false || true', ls /no/such/file]"
    shell = Shell(tmp_path, "exit 0", setup)
    process = shell.start()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "set-up failed: ls /no/such/file" in errors
    assert not shell.calls("supervise")


def test_modules_are_words_and_a_missing_one_ends_the_job(tmp_path: Path) -> None:
    hostile = "a; touch pwned $(touch pwned) 'x"
    shell = Shell(tmp_path, "exit 0", f"cluster.backend.slurm.modules=[{hostile!r}]".replace("'x", "x"))
    text = shell.script.read_text().replace(
        "# A batch shell is", 'module() { echo "got:$2"; [ "$2" = ok ]; }\n#'
    )
    shell.script.write_text(text)
    process = subprocess.run(
        ["bash", shell.script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 2
    assert "got:a; touch pwned $(touch pwned)" in process.stdout
    assert not (tmp_path / "pwned").exists()
