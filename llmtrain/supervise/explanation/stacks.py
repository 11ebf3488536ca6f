"""Stacks that faulthandler wrote for the ranks of an attempt, grouped: ranks that stand at the same place are
one group. Pure but for reading the files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
THREAD = re.compile(r"^(?:Current thread|Thread) (?P<id>0x[0-9a-f]+)")
TAIL_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class StackGroup:
    """Ranks whose main threads stand at the same place."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...]
    """Innermost first: `file:line function`."""


def main_stack(text: str) -> tuple[str, ...]:
    """Frames of the main thread in the newest dump of a file; empty when there is none.

    faulthandler writes every thread of a dump, the one that handled the signal, which is the main one, last.
    """
    frames: list[str] = []
    for line in text.splitlines():
        if THREAD.match(line):
            frames = []
        elif match := FRAME.match(line):
            file = "/".join(Path(match["file"]).parts[-2:])
            frames.append(f"{file}:{match['line']} {match['name']}")
    return tuple(frames)


def group_stacks(stacks: Mapping[int, tuple[str, ...]]) -> list[StackGroup]:
    """Groups of ranks with equal stacks, the smallest first: who differs from the crowd is of interest."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, frames in sorted(stacks.items()):
        if frames:
            groups.setdefault(frames, []).append(rank)
    found = [StackGroup(ranks=tuple(ranks), frames=frames) for frames, ranks in groups.items()]
    return sorted(found, key=lambda group: (len(group.ranks), group.ranks))


def read_stacks(folder: Path) -> dict[int, tuple[str, ...]]:
    """Main stack of every rank that wrote one into a folder of stack dumps."""
    found = {}
    for path in sorted(folder.glob("rank-*.txt")):
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
            found[int(path.stem.removeprefix("rank-"))] = main_stack(text)
        except (OSError, ValueError):
            continue
    return found
