"""The frame around every command: exit codes, crashes, pipes, interrupts, colour, JSON of errors."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from llmtrain import __version__
from llmtrain.cli import console, main
from llmtrain.errors import CheckpointError, ExitStatus, InfeasibleError, Problem, RunError, UsageError


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # Where the second crash of a second goes.
    return tmp_path


def with_command(monkeypatch: pytest.MonkeyPatch, body) -> None:
    """An app whose `plan` command runs `body`."""

    def make(commands: object) -> typer.Typer:
        app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
        app.callback()(lambda: None)
        app.command("plan")(body)
        return app

    monkeypatch.setattr(main, "make_app", make)


def raising(error: BaseException):
    def body():
        raise error

    return body


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"llmtrain {__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in main.COMMANDS:
        assert f"\n  {command} " in shown
    assert "..." not in shown.replace("[ARGS]...", ""), "a summary is cut: its first sentence is too long"


@pytest.mark.parametrize("command", main.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([command, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"Usage: llmtrain {command}")
    assert not re.search(r"\w\.\.\.$", captured.out, re.MULTILINE), "a summary is cut"
    assert captured.err == ""


def test_no_command_shows_help_as_talk(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Usage: llmtrain")


@pytest.mark.parametrize("group", ["data", "checkpoint"])
def test_a_group_without_a_command_shows_its_help(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([group]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"Usage: llmtrain {group}")
    assert "Commands:" in captured.err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RunError("no", where="runs/a", hint="look"), ExitStatus.FAILED),
        (CheckpointError("no", where="runs/a", hint="look"), ExitStatus.FAILED),
        (UsageError("no", where="runs/a", hint="look"), ExitStatus.USAGE),
        (InfeasibleError([Problem("runs/a", "no", "look")]), ExitStatus.INFEASIBLE),
    ],
)
def test_errors_become_exit_codes(error, status, monkeypatch, capsys) -> None:
    with_command(monkeypatch, raising(error))
    assert main.run(["plan"]) == status
    assert capsys.readouterr() == ("", "error: runs/a: no\n  hint: look\n")


@pytest.mark.parametrize("status", [0, 1, 3, 75, 93, 137])
def test_a_command_may_return_or_exit_with_a_code(status, monkeypatch) -> None:
    with_command(monkeypatch, lambda: status)
    assert main.run(["plan"]) == status
    with_command(monkeypatch, raising(typer.Exit(status)))
    assert main.run(["plan"]) == status


def test_errors_of_json_commands_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "tinny", "--json"]) == 2
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["schema"] == 1
    assert [set(problem) for problem in document["problems"]] == [{"where", "message", "hint"}]
    assert document["problems"][0]["message"] == "no recipe is called `tinny`"
    assert captured.err.startswith("error: no recipe is called `tinny`")


def test_a_crash_is_one_line_and_a_file(monkeypatch, capsys, own_home: Path) -> None:
    with_command(monkeypatch, raising(ZeroDivisionError("a\nb")))
    assert main.run(["plan"]) == 1
    captured = capsys.readouterr()
    first, second = captured.err.splitlines()
    assert first == "error: unexpected ZeroDivisionError: a"
    [report] = (own_home / "state" / "llmtrain").glob("crash-*.txt")
    assert second == f"  hint: this is a defect of llmtrain; traceback in {report}"
    assert report.stat().st_mode & 0o777 == 0o600
    text = report.read_text()
    assert "Traceback (most recent call last)" in text
    assert "arguments: ['plan']" in text
    assert captured.out == ""


def test_a_crash_without_a_home(monkeypatch, capsys, own_home: Path) -> None:
    (own_home / "state").write_text("not a folder")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(own_home / "state" / "below"))
    with_command(monkeypatch, raising(RuntimeError("x" * 1000)))
    assert main.run(["plan"]) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.endswith("the traceback could not be saved\n")
    assert max(len(line) for line in captured.err.splitlines()) < 300


def test_an_error_of_the_system_names_the_file(monkeypatch, capsys) -> None:
    with_command(monkeypatch, raising(PermissionError(13, "Permission denied", "/data/x")))
    assert main.run(["plan"]) == 1
    assert capsys.readouterr().err.startswith("error: /data/x: permission denied\n  hint: traceback in ")


def test_recursion_and_memory_are_no_special_case(monkeypatch, capsys, own_home: Path) -> None:
    for error in (RecursionError("deep"), MemoryError()):
        with_command(monkeypatch, raising(error))
        assert main.run(["plan"]) == 1
        assert f"unexpected {type(error).__name__}" in capsys.readouterr().err
    assert len([*own_home.rglob("crash-*.txt")]) == 2, "each has a report of its own"


def test_interrupt(monkeypatch, capsys) -> None:
    with_command(monkeypatch, raising(KeyboardInterrupt()))
    assert main.run(["plan"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_real_interrupt_leaves_with_130() -> None:
    code = (
        "import signal, sys, time, typer\n"
        # A background shell starts its children with SIGINT ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from llmtrain.cli import main\n"
        "def make(commands):\n"
        "    app = typer.Typer(); app.callback()(lambda: None)\n"
        "    def plan():\n"
        "        print('ready', flush=True); time.sleep(30)\n"
        "    app.command('plan')(plan)\n"
        "    return app\n"
        "main.make_app = make\n"
        "sys.exit(main.run(['plan']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=20)
    assert child.returncode == 130
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "arguments", [["recipes", "show", "tiny"], ["plan", "--help"], ["recipes", "--json"]]
)
def test_a_closed_pipe_is_quiet(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "llmtrain", *arguments]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 128 + signal.SIGPIPE


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "llmtrain", "recipes", "show", "tiny"]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert "no space left on device" in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_text_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "caf\xe9.yaml").write_text("name: \u2603\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "llmtrain", "recipes", "check", "caf\xe9.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 2
    assert "caf\\xe9.yaml:1: name must be" in done.stderr
    assert "\\u2603" in done.stderr


def on_terminal(arguments: list[str], **variables: str) -> str:
    """What a command says on a terminal of its own."""
    ours, theirs = pty.openpty()
    environment = {**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", **variables}
    command = [sys.executable, "-m", "llmtrain", *arguments]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            break
        if not piece:
            break
        seen += piece
    child.wait(timeout=10)
    os.close(ours)
    return seen.decode()


def test_colour_on_terminals_only_and_never_with_no_color() -> None:
    assert "\x1b[31;1merror:\x1b[0m" in on_terminal(["plan", "tinny"])
    assert "\x1b[" not in on_terminal(["plan", "tinny"], NO_COLOR="1")
    assert "\x1b[" not in on_terminal(["plan", "tinny"], TERM="dumb")
    assert "\x1b[" not in on_terminal(["recipes", "--json"])
    assert console.paint("x", "red", stream=io.StringIO()) == "x"


def test_columns() -> None:
    table = console.columns(("A", "LONG"), [("x", "1"), ("yyy", "22")], right=(1,))
    assert table == "A    LONG\nx       1\nyyy    22"
