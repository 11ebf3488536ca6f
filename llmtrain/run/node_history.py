"""What became known of nodes and GPUs, over all runs of a storage folder: `STORAGE/.nodes/NODE.jsonl`.

`doctor` and supervisors append a line a verdict; placement reads them, so that a node that was convicted
lately is used last. A hint, never a lock: whoever cannot read or write it goes on without.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

from llmtrain.units import DAY

FOLDER = ".nodes"
REMEMBERED: Mapping[str, float] = {"unfit": DAY, "lost": DAY, "slow": 7 * DAY}
"""Seconds for which a conviction counts, unless a later verdict clears the node."""
READ_BYTES = 1 << 16

Word = Literal["fit", "slow", "unfit", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What somebody found out about a node."""

    node: str
    time: float
    """Epoch seconds."""
    verdict: Word
    """`slow`: the doctor's tests convict it; `unfit`: something is wrong with it; `lost`: a run lost it;
    `fit`: all is well, which clears it."""
    why: str = ""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that this is about; a conviction of some GPUs alone goes where they go."""
    by: str = ""
    """Run id, or `doctor`."""


def remember(storage: Path, verdicts: Iterable[Verdict]) -> None:
    """Append verdicts; whatever the file system says."""
    for verdict in verdicts:
        with suppress(OSError):
            file = storage / FOLDER / f"{quote(verdict.node, safe='')}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="ascii") as stream:
                stream.write(json.dumps(asdict(verdict)) + "\n")


def recall(storage: Path) -> tuple[Verdict, ...]:
    """All verdicts that can be read, the oldest first."""
    found: list[Verdict] = []
    with suppress(OSError):
        for file in (storage / FOLDER).glob("*.jsonl"):
            with suppress(OSError), file.open("rb") as stream:
                stream.seek(max(0, file.stat().st_size - READ_BYTES))
                lines = stream.read().decode("ascii", "replace").splitlines()
                name = unquote(file.name.removesuffix(".jsonl"))
                found += [each for line in lines if (each := _verdict(line, name)) is not None]
    return tuple(sorted(found, key=lambda verdict: verdict.time))


def suspects(verdicts: Sequence[Verdict], gpus: Mapping[str, Sequence[str]], now: float) -> dict[str, str]:
    """Node -> why it should be used last; `gpus` are the UUIDs that each node has now. Pure."""
    standing: dict[str, Verdict] = {}
    for verdict in sorted(verdicts, key=lambda each: each.time):
        for subject in _subjects(verdict):
            standing[subject] = verdict
    found: dict[str, str] = {}
    for node, uuids in gpus.items():
        for subject in (f"node {node}", *(f"gpu {uuid}" for uuid in uuids)):
            known = standing.get(subject)
            if known is None or known.verdict == "fit" or node in found:
                continue
            if now - known.time <= REMEMBERED[known.verdict]:
                found[node] = f"{known.verdict} {_age(now - known.time)} ago: {known.why}"
    return found


def _subjects(verdict: Verdict) -> Iterable[str]:
    """What a verdict is about: the node and its GPUs when all is well, else the GPUs if it names some."""
    own = [f"gpu {uuid}" for uuid in verdict.gpus]
    if verdict.verdict == "fit":
        return [f"node {verdict.node}", *own]
    return own or [f"node {verdict.node}"]


def _age(seconds: float) -> str:
    if seconds < 5400:
        return f"{max(1, round(seconds / 60))} min"
    return f"{round(seconds / 3600)} h" if seconds < 2 * DAY else f"{round(seconds / DAY)} days"


def _verdict(line: str, node: str) -> Verdict | None:
    """None for a torn line, or one of another version."""
    try:
        raw: dict[str, Any] = json.loads(line)
        word = raw["verdict"]
        if word not in ("fit", *REMEMBERED):
            return None
        return Verdict(
            node=node,
            time=float(raw["time"]),
            verdict=word,
            why=str(raw.get("why", "")),
            gpus=tuple(str(uuid) for uuid in raw.get("gpus", ())),
            by=str(raw.get("by", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
