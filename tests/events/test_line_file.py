"""Lines on storage that fails in every way, drawn from a seed: each is in the file once."""

import errno
import json
import os
import random
from pathlib import Path

import pytest

from llmtrain.events import line_file
from llmtrain.events.line_file import LineFile

LINES = 150


class Storage:
    """Three of ten writes to a file fail: refused, done all the same, done in part, or with earlier lines
    lost."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        self.path, self.chance = path, chance
        self.fails = True
        self.write_really = os.write

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.fails or self.chance.random() < 0.7:
            return self.write_really(descriptor, data)
        match self.chance.randrange(4):
            case 0:
                raise OSError(errno.ESTALE, "Stale file handle")
            case 1:
                self.write_really(descriptor, data)
                raise OSError(errno.EIO, "Input/output error")
            case 2:
                return self.write_really(descriptor, data[: self.chance.randrange(1, len(data) + 1)])
            case _:
                size = self.path.stat().st_size
                os.truncate(self.path, max(0, size - self.chance.randrange(200)))
                raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("seed", range(20))
def test_every_line_is_in_the_file_once(tmp_path, monkeypatch, seed) -> None:
    chance = random.Random(seed)
    storage = Storage(tmp_path / "lines", chance)
    monkeypatch.setattr(line_file, "REMEMBERED_BYTES", chance.choice((4000, 100_000)))
    monkeypatch.setattr(os, "write", storage.write)
    file = LineFile(storage.path)
    for number in range(LINES):
        line = json.dumps([number, "y" * chance.randrange(60)]).encode() + b"\n"
        while True:
            try:
                file.append(line)
                break
            except OSError:
                continue
    storage.fails = False
    file.close()
    found = []
    for text in storage.path.read_bytes().split(b"\n"):
        try:
            found.append(json.loads(text)[0])
        except ValueError:
            continue  # torn
    assert sorted(found) == list(range(LINES))
