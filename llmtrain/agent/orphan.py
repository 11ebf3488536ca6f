"""What an agent does last when its supervisor has vanished: it tells the scheduler, which starts the job
again."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

HELP_SECONDS = 240.0
"""For the command: it makes sure that nobody is in charge, and lets another node's agent do it first."""


def call_for_help(argv: Sequence[str], log: Path) -> None:
    """Run a command to its end, its output appended to a log; whatever becomes of it, the agent leaves."""
    with suppress(OSError, subprocess.SubprocessError), log.open("ab") as output:
        subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=HELP_SECONDS,
            check=False,
        )
