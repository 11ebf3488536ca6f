"""The script that a node is sent, given to the shells of this machine: any arguments arrive."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.transport.base import TransportError
from llmtrain.transport.ssh_script import bootstrap, exit_code, open_script, run_script, words

PYTHON = sys.executable
ECHO = """import sys
words = [word.encode("utf-8", "surrogateescape") for word in sys.argv[1:]]
sys.stdout.buffer.write(repr(words).encode())
"""
VARIABLES = """import os, sys
sys.stdout.buffer.write(repr({k: v for k, v in os.environb.items() if k[:1] == b"X"}).encode())
"""
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30)


def through(script: str, stdin: bytes = b"", shell: str = "sh") -> subprocess.CompletedProcess[bytes]:
    """What sshd does: the login shell gets one command line, the rest comes over standard input."""
    data = script.encode("utf-8", "surrogateescape")
    return subprocess.run(
        [shell, "-c", bootstrap(len(data))], input=data + stdin, capture_output=True, timeout=30, check=False
    )


@settings(max_examples=25)
@given(st.lists(WORDS, max_size=5))
def test_any_arguments_arrive(arguments: list[str]) -> None:
    done = through(run_script([PYTHON, "-S", "-c", ECHO, *arguments], 20))
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout) == [each.encode() for each in arguments]


@settings(max_examples=15)
@given(st.dictionaries(st.from_regex(r"\AX[A-Z_0-9]{0,8}\Z"), WORDS, max_size=4))
def test_any_variables_arrive(variables: dict[str, str]) -> None:
    done = through(open_script([PYTHON, "-S", "-c", VARIABLES], variables))
    pid, _, text = done.stdout.partition(b"\n")
    assert pid.isdigit()
    found = eval(text)
    assert {name: found[name.encode()].decode() for name in variables} == variables


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "tcsh", "fish"])
def test_login_shells_read_the_command_the_same_way(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"the shell {shell} is not installed")
    hostile = ["a'b\"c", "$(id)", "!x", "new\nline", "\\", "`id`"]
    done = through(run_script([PYTHON, "-S", "-c", ECHO, *hostile], 20), shell=shell)
    assert eval(done.stdout) == [each.encode() for each in hostile], done.stderr


def test_what_follows_the_script_is_left_for_the_command() -> None:
    data = bytes(range(256)) * 100
    assert through(run_script(["cat"], 20), data).stdout == data
    said, _, rest = through(open_script(["cat"], {}), data).stdout.partition(b"\n")
    assert said.isdigit()
    assert rest == data


@pytest.mark.parametrize(
    ("command", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", -9), ("kill -TERM $$", -15)]
)
def test_exit_codes(command: str, code: int) -> None:
    assert exit_code(through(run_script(["sh", "-c", command], 20)).returncode) == code
    assert exit_code(through(open_script(["sh", "-c", command], {})).returncode) == code


def test_time_is_kept_on_the_node() -> None:
    done = through(run_script(["sh", "-c", "sleep 30 & sleep 30"], 0.5))
    assert exit_code(done.returncode) == -9


def test_command_line_holds_no_value() -> None:
    assert bootstrap(17) == "exec /bin/sh -c 'eval \"$(dd bs=1 count=17 2>/dev/null)\"'"


def test_refused_values() -> None:
    with pytest.raises(TransportError, match="holds a NUL character"):
        words(["a\0"])
    for name in ("", "1A", "A B", "A;id", "A\n"):
        with pytest.raises(TransportError, match="is not the name of a variable"):
            open_script(["true"], {name: "x"})
