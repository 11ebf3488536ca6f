"""A file that lines are appended to, on storage that may go away: whole lines, none lost, none twice.

A file server that comes back may not know a descriptor any more (ESTALE), and a network file system may say
only at the next write, or at the close, that it lost what it had taken before. So after any error the file is
opened anew, and of the last lines those that it lacks are written again.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections import deque
from contextlib import suppress
from pathlib import Path

REMEMBERED_BYTES = 1 << 18
"""About so much of the end may have been taken and then lost: what a source tells in minutes, while a network
file system keeps what is not written for half a minute."""


class LineFile:
    """One `write` call a line, on a descriptor opened for appending, so that several processes may share it.

    The constructor raises OSError when the file cannot be opened. For one thread.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._recent: deque[tuple[int, bytes]] = deque()
        """Where each of the last lines begins, in bytes, and the line."""
        self._recent_bytes = 0
        self._is_in_doubt = False
        self._file = -1
        self._open()
        self._end = path.stat().st_size
        """Where the last line ended, in bytes."""

    def append(self, line: bytes) -> None:
        """Write a line, which ends with a newline. Raises OSError when it is not in the file, or in part, or
        when nobody knows: then try it again."""
        begin = self._settle().get(line) if self._is_in_doubt else None
        if begin is None:
            self._is_in_doubt = True
            begin = self._write(line)
            self._is_in_doubt = False
        self._recent.append((begin, line))
        self._recent_bytes += len(line)
        while self._recent_bytes > REMEMBERED_BYTES:
            self._recent_bytes -= len(self._recent.popleft()[1])

    def close(self) -> None:
        """Close the file; when something may be lost, try once to make up for it. Never raises."""
        with suppress(OSError):
            try:
                if self._is_in_doubt:
                    self._settle()
                self._release()
            except OSError:
                self._settle()
        with suppress(OSError):
            self._release()

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self.path, flags, 0o644)
        with suppress(OSError):
            self._release()
        self._file = file
        self._is_torn = not _ends_with_newline(self.path)

    def _release(self) -> None:
        """Give the descriptor back, which is gone even when that fails."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _settle(self) -> dict[bytes, int]:
        """Open the file anew, write the remembered lines that it lacks, and return those that it had from the
        first of them on, with the bytes where they begin. Raises OSError, then it is to be done again."""
        self._open()
        first = min((begin for begin, _ in self._recent), default=self._end)
        there = _lines(self.path, first)
        for index, (_, line) in enumerate(self._recent):
            begin = there[line] if line in there else self._write(line)
            self._recent[index] = (begin, line)
        self._is_in_doubt = False
        return there

    def _write(self, line: bytes) -> int:
        """Write a line; the byte where it begins."""
        try:
            written = os.write(self._file, b"\n" + line if self._is_torn else line)
        except OSError as error:
            if error.errno == errno.EBADF:  # somebody closed it; the number may soon be another file's
                self._file = -1
            raise
        if written == len(line) + self._is_torn:
            self._is_torn = False
            self._end = os.lseek(self._file, 0, os.SEEK_CUR)
            return self._end - len(line)
        # A nearly full disk takes a part of the line: the next one must start on a line of its own.
        self._is_torn = self._is_torn or written > 0
        raise OSError(errno.ENOSPC, f"the disk took {written} of {len(line)} bytes")


def _lines(path: Path, first: int) -> dict[bytes, int]:
    """Lines of a file from a byte on, and where each begins; the last one may lack its newline."""
    with path.open("rb") as file:
        file.seek(first)
        lines = [line + b"\n" for line in file.read().split(b"\n")]
    begins = itertools.accumulate(map(len, lines), initial=first)
    return dict(zip(lines, begins, strict=False))


def _ends_with_newline(path: Path) -> bool:
    """Whether a new line may start at the end of the file; an earlier writer may have died inside a line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
