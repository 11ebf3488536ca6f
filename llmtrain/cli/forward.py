"""Commands about a run that lives on a login node run there; what they say is passed on."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtrain.run.layout import RunDir

ENDLESS = ("--watch", "--follow", "-f")


def forwarded(run: RunDir, reference: str) -> int | None:
    """Exit code of this very command on the login node that its run lives on; None when it lives here.

    `reference` is the word that named the run. Raises UsageError for a command that has no end of its own,
    RunError when nobody answers.
    """
    if not run.remote_json.exists():  # Nearly always; a look costs nothing.
        return None
    from llmtrain.run.remote import read_remote

    remote = read_remote(run)
    if remote is None:
        return None
    words = [remote.path if word == reference else word for word in sys.argv[1:]]
    if "--runs" in words:
        del words[words.index("--runs") : words.index("--runs") + 2]
    if any(word in ENDLESS for word in words):
        from llmtrain.errors import UsageError

        typed = shlex.join(["ssh", "-t", remote.login, remote.python, "-m", "llmtrain", *words])
        message = f"the run lives on {remote.login}, from where nothing is followed without end"
        raise UsageError(message, hint=f"`{typed}`")
    from llmtrain.backends.slurm.login import forward

    if "resume" in words[:1] and "--detach" not in words:
        words.append("--detach")
    done = forward(remote, words)
    sys.stdout.write(done.stdout.decode("utf-8", "replace"))
    sys.stdout.flush()
    sys.stderr.write(done.stderr.decode("utf-8", "replace"))
    return done.exit_code
