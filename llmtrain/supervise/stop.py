"""Asking the supervisor of a run to stop, from any process that may write its folder."""

from __future__ import annotations

from llmtrain.errors import RunError
from llmtrain.run.atomic import write_atomic
from llmtrain.run.layout import RunDir


def ask_to_stop(run: RunDir, *, now: bool = False, grace: float | None = None) -> None:
    """Write the STOP file, which the supervisor sees within a fraction of a second. Raises RunError.

    `grace` is how long the ranks get to save before they are killed; default: the supervisor's own limit.
    """
    text = "now" if now else "save" if grace is None else f"save {grace:g}"
    try:
        write_atomic(run.stop_file, f"{text}\n")
    except OSError as error:
        raise RunError(f"cannot be written: {error.strerror}", where=str(run.stop_file)) from error
