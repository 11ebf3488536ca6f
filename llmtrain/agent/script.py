"""Starting the node script, which becomes torchrun."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from llmtrain.agent import messages
from llmtrain.run.layout import RunDir
from llmtrain.run.markers import ATTEMPT_MARKER, RUN_MARKER, STANDBY_MARKER
from llmtrain.run.parent import tie_to


def start_script(
    run: RunDir, start: messages.Start, log: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the node script in a session of its own, its output appended to a log; `variables` are added to
    its environment.

    In standby its standard input is a pipe into which nobody writes: all its descendants see it end when
    the agent closes it. Raises OSError.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = (start.attempt, start.node, start.nodes, start.ranks, start.address, start.port)
    markers = {RUN_MARKER: str(run.path), ATTEMPT_MARKER: str(start.attempt)}
    if start.standby:
        markers[STANDBY_MARKER] = "1"
    with log.open("ab") as output:
        # The only fork, and before any thread exists: code between fork and exec is safe here.
        return subprocess.Popen(
            ["bash", str(run.scripts / "node.sh"), *(str(value) for value in arguments)],
            stdin=subprocess.PIPE if start.standby else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **start.environment, **variables, **markers},
            start_new_session=True,
            preexec_fn=tie_to(os.getpid()),  # noqa: PLW1509
        )
