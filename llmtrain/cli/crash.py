"""An error that nobody foresaw: one line for the person, the traceback in a file."""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from llmtrain import __version__
from llmtrain.errors import Problem


def crash_problem(error: BaseException, arguments: Sequence[str]) -> Problem:
    """What to show; the traceback is written beside it. Raises nothing."""
    path = _write(error, arguments)
    place = f"traceback in {path}" if path is not None else "the traceback could not be saved"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return Problem(where=os.fsdecode(error.filename), message=error.strerror.lower(), hint=place)
    lines = str(error).strip().splitlines()
    said = f": {lines[0][:200]}" if lines else ""
    return Problem("", f"unexpected {type(error).__name__}{said}", f"this is a defect of llmtrain; {place}")


def _write(error: BaseException, arguments: Sequence[str]) -> Path | None:
    """Write the report where only its owner can read it; None when no folder takes it."""
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    head = f"llmtrain {__version__}, Python {platform.python_version()}, {platform.platform()}"
    text = f"{head}\narguments: {list(arguments)!r}\n\n{''.join(traceback.format_exception(error))}"
    import tempfile  # Only a crash needs it, every command would load it.

    for folder in (_state_folder(), Path(tempfile.gettempdir())):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
        except OSError:
            continue
        return folder / name
    return None


def _state_folder() -> Path | None:
    """`$XDG_STATE_HOME/llmtrain`, by default `~/.local/state/llmtrain`; None without a home folder."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".local" / "state") / "llmtrain"
    except RuntimeError:
        return None
