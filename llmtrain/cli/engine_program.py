"""The engine's small programs, each in a process of its own: the command line never imports torch."""

from __future__ import annotations

import json
from typing import Any

LIMIT_SECONDS = 600.0


def answer_of(module: str, request: Any = None, *, task: str, where: str = "") -> dict[str, Any]:
    """The JSON object that a module of the engine prints, asked with `request` as JSON on its standard input.

    `task` says what it does, `where` which option wanted it. Raises RunError when it fails, and
    subprocess.TimeoutExpired after ten minutes.
    """
    import subprocess
    import sys

    from llmtrain.errors import RunError

    result = subprocess.run(
        [sys.executable, "-m", module],
        input=None if request is None else json.dumps(request),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    if result.returncode:
        raise RunError(f"{task} failed: {result.stderr.strip().splitlines()[-1:]}", where=where)
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer
