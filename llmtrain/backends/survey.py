"""Asking a node what it is: `node_report.py`, sent over a transport; a file proves the shared folder."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from llmtrain.backends.preflight import Expected, Health, Report, problems_of
from llmtrain.config.codec import from_json
from llmtrain.errors import ConfigError, LlmtrainError, Problem, RunError
from llmtrain.transport.base import Completed, Transport, TransportError

REPORT_SECONDS = 30.0
"""For a node to start Python, perhaps from a slow shared folder, and describe itself."""
SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Set to the interface of a node's address: left alone, libraries take the first one, or what the host name
resolves to, which on many systems is the loopback device."""
SSHD_SAYS = "Could not chdir to home directory"
"""What sshd adds for an account without a home folder, which keeps nothing from running."""
SAID_CHARACTERS = 500
PYTHON_HINT = "an interpreter that has llmtrain on every node: backend.python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What looking at nodes has found, node by node."""

    names: tuple[str, ...]
    """All that were looked for, in their order."""
    reports: Mapping[str, Report]
    """Of those that answered."""
    problems: Mapping[str, tuple[Problem, ...]]
    """What is wrong with nodes, those without an answer included."""
    gpus: int = 0
    """GPUs that each of them should have."""

    @property
    def fit(self) -> dict[str, Report]:
        """Nodes that answered and have nothing wrong, in order."""
        return {
            name: self.reports[name] for name in self.names if name in self.reports.keys() - self.problems
        }

    def with_problems(self, found: Mapping[str, Problem]) -> Survey:
        """The same with one more problem of some nodes."""
        problems = {**self.problems}
        for name, problem in found.items():
            problems[name] = (*problems.get(name, ()), problem)
        return replace(self, problems=problems)

    @property
    def all_problems(self) -> tuple[Problem, ...]:
        """All problems in the order of the nodes."""
        return tuple(each for name in self.names for each in self.problems.get(name, ()))


def judged(
    names: Sequence[str],
    reports: Mapping[str, Report],
    failed: Mapping[str, LlmtrainError],
    expected: Expected,
) -> Survey:
    """Reports and failures of nodes, held against what is expected and against each other."""
    problems = {name: list(error.problems) for name, error in failed.items()} | problems_of(reports, expected)
    return Survey(
        names=tuple(names),
        reports=reports,
        problems={name: tuple(found) for name, found in problems.items()},
        gpus=expected.gpus,
    )


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


def ask(transport: Transport, name: str, python: str, nonce: Path, *, write: bool = False) -> Report:
    """What a node says about itself; with `write`, after a file was written there as a test.

    Raises TransportError.
    """
    source = Path(__file__).with_name("node_report.py").read_bytes()
    began = time.time()
    try:
        words = [python, "-", str(nonce), *(["write"] if write else [])]
        done = transport.run(words, timeout=REPORT_SECONDS, stdin=source)
    except TransportError as error:
        raise TransportError(str(error), hint=error.problems[0].hint or PYTHON_HINT) from error
    took = time.time() - began
    try:
        if done.exit_code:
            raise ValueError
        raw = json.loads(done.stdout.splitlines()[-1])
        fields = {field.name for field in dataclasses.fields(Report)}
        known = {key: value for key, value in raw.items() if key in fields}
        known["health"] = _health(known.get("health"))
        known["missing"] = tuple(known.get("missing", ()))
        return Report(**known, seen_at=began + took / 2, uncertainty=took / 2)
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        reason = _last_words(done) or f"exit code {done.exit_code}"
        raise TransportError(f"{name}: `{python}` does not run: {reason}", hint=PYTHON_HINT) from error


def _last_words(done: Completed) -> str:
    """The last line of what a command said, on standard output where there is no error: an account without a
    shell says so there."""
    for stream in (done.stderr, done.stdout):
        lines = stream.decode("utf-8", "replace").strip().splitlines()
        lines = [line for line in lines if line.strip() and not line.startswith(SSHD_SAYS)]
        if lines:
            return lines[-1][:SAID_CHARACTERS]
    return ""


def _health(raw: object) -> Health | None:
    """None from a node whose llmtrain is missing or of another version, which is told anyway."""
    try:
        return from_json(Health, raw) if isinstance(raw, dict) and raw else None
    except ConfigError:
        return None
