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


def unreadable_setup(lines: Sequence[str]) -> list[Problem]:
    """What keeps bash from reading the lines as they stand in a job's script; [] where there is no bash.

    Together they must be whole: what they leave open would swallow the lines of the script below them.
    """
    if not lines:
        return []
    if _CONTINUED.search(lines[-1]):
        message = "it ends in a backslash, which joins it to the line of the script below it"
        return [Problem(f"{PLACE}.{len(lines) - 1}", message, "remove the backslash")]
    try:
        done = subprocess.run(
            ["bash", "-n"],
            input="".join(f"{line}\n" for line in lines),
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=READ_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = _LINE.search(done.stderr)
    if done.returncode == 0 and found is None:
        return []
    number, said = (int(found[1]), found[2]) if found is not None else (1, "it cannot be read")
    place = f"{PLACE}.{min(number, len(lines)) - 1}"
    message = f"bash cannot read it: {said}"
    return [Problem(place, message, "its lines are one piece of shell; `bash -n` checks one")]
