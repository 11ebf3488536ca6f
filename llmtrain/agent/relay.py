"""Event lines of this node's ranks, passed on as they are; the supervisor folds them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmtrain.events.event import LINE_LIMIT

CHUNK = 1 << 18


class Relay:
    """Follows growing files and returns whole new lines; a torn last line waits for its rest."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._offsets = dict.fromkeys(paths, 0)

    def poll(self) -> list[str]:
        """New whole lines of all files, each file's in order; lines that are too long are skipped."""
        lines: list[str] = []
        for path, offset in self._offsets.items():
            data = _read_from(path, offset)
            whole = data.rfind(b"\n") + 1
            if not whole and len(data) > LINE_LIMIT:
                whole = len(data)
            self._offsets[path] = offset + whole
            for line in data[:whole].splitlines():
                if line and len(line) <= LINE_LIMIT:
                    lines.append(line.decode("utf-8", "replace"))
        return lines


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(4 * CHUNK + LINE_LIMIT)
    except OSError:
        return b""
