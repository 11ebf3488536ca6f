"""The profile's lines of shell, read by bash before a job waits in the queue to find that it cannot."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from llmtrain.errors import Problem

PLACE = "backend.slurm.setup"
READ_SECONDS = 10.0
_LINE = re.compile(r"line (\d+): (.*)")
_CONTINUED = re.compile(r"(?<!\\)(\\\\)*\\\Z")
_COMMENTED = re.compile(r"""(?:(?:[^'"\\#]|'[^']*'|"[^"\\]*")*[\s;&|()])?#""")
_READINGS = ((), ("-O", "extglob"))
"""Lines may set extglob, which `bash -n` does not carry out: what either reading takes is well."""
_OLDEST = 4
"""Bash that reads what clusters write (`&>>`, `|&`); a Mac's own is older than any cluster's."""


def unreadable_setup(lines: Sequence[str]) -> list[Problem]:
    """What keeps bash from reading the lines as they stand in a job's script; [] where bash is not there, or
    too old to tell.

    Together they must be whole: what they leave open would swallow the lines of the script below them.
    """
    if not lines:
        return []
    if _CONTINUED.search(lines[-1]) and not _COMMENTED.match(lines[-1]):
        message = "it ends in a backslash, which joins it to the line of the script below it"
        return [Problem(f"{PLACE}.{len(lines) - 1}", message, "remove the backslash")]
    text = "".join(f"{line}\n" for line in lines)
    try:
        for reading in _READINGS:
            done = _bash(*reading, "-n", read=text)
            found = _LINE.search(done.stderr)
            if done.returncode == 0 and found is None:
                return []
        version = _bash("-c", 'echo "${BASH_VERSINFO[0]}"').stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return []
    if not version.isdigit() or int(version) < _OLDEST:
        return []
    number, said = (int(found[1]), found[2]) if found is not None else (1, "it cannot be read")
    place = f"{PLACE}.{min(number, len(lines)) - 1}"
    message = f"bash cannot read it: {said}"
    return [Problem(place, message, "its lines are one piece of shell; `bash -n` checks one")]


def _bash(*arguments: str, read: str = "") -> subprocess.CompletedProcess[str]:
    """Whatever the locale, and also with characters that no file can hold: only the syntax counts."""
    done = subprocess.run(
        ["bash", *arguments],
        input=read.encode("utf-8", "replace"),
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
        capture_output=True,
        timeout=READ_SECONDS,
        check=False,
    )
    out, err = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)
