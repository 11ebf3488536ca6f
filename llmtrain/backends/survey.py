"""Asking a node what it is: `node_report.py`, sent over a transport; a file proves the shared folder."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmtrain.backends.preflight import Report
from llmtrain.errors import RunError
from llmtrain.transport.base import Transport, TransportError

REPORT_SECONDS = 30.0
"""For a node to start Python, perhaps from a slow shared folder, and describe itself."""
SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Set to the interface of a node's address: left alone, libraries take the first one, or what the host name
resolves to, which on many systems is the loopback device."""
PYTHON_HINT = "an interpreter that has llmtrain on every node: backend.python"


@contextmanager
def nonce_file(folder: Path) -> Iterator[tuple[Path, str]]:
    """A file in a folder that proves that others see the same folder. Raises RunError."""
    text = os.urandom(16).hex()
    file = folder / f".llmtrain-{text[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    except OSError as error:
        message = f"cannot be written here: {(error.strerror or str(error)).lower()}"
        raise RunError(message, where=str(folder), hint="storage.path or --run-dir names it") from error
    try:
        yield file, text
    finally:
        with suppress(OSError):
            file.unlink()


def ask(transport: Transport, name: str, python: str, nonce: Path) -> Report:
    """What a node says about itself. Raises TransportError."""
    source = Path(__file__).with_name("node_report.py").read_bytes()
    began = time.time()
    try:
        done = transport.run([python, "-", str(nonce)], timeout=REPORT_SECONDS, stdin=source)
    except TransportError as error:
        raise TransportError(str(error), hint=error.problems[0].hint or PYTHON_HINT) from error
    took = time.time() - began
    try:
        if done.exit_code:
            raise ValueError
        raw = json.loads(done.stdout.splitlines()[-1])
        fields = {field.name for field in dataclasses.fields(Report)}
        known = {key: value for key, value in raw.items() if key in fields}
        return Report(**known, seen_at=began + took / 2, uncertainty=took / 2)
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = words[-1] if words else f"exit code {done.exit_code}"
        raise TransportError(f"{name}: `{python}` does not run: {reason}", hint=PYTHON_HINT) from error
