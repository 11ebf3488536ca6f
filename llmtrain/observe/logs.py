"""The log files of a run as one stream: of all ranks with a prefix, of one rank, of one attempt; followed
or not.

Log lines carry no common clock, so files are not sorted line by line: without `follow` each file's last
lines come in one piece, ranks in order; with `follow` new lines come as they appear.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmtrain.errors import UsageError
from llmtrain.observe.job_facts import read_job_facts
from llmtrain.observe.run_reader import RunReader
from llmtrain.run.layout import AttemptDir, RunDir

POLL_SECONDS = 0.3
BLOCK = 1 << 16
LONGEST_LINE = 1 << 16
"""A longer line is cut into pieces."""


@dataclass(frozen=True, slots=True)
class LogFile:
    """One file and the word that stands before its lines."""

    label: str
    path: Path
    attempt: int | None = None
    """None: it is of the whole run."""


@dataclass(slots=True)
class LogTail:
    """Reads whole lines as they are appended. A line that ends with a carriage return (a progress bar)
    counts as one."""

    file: LogFile
    offset: int = 0
    partial: bytes = field(default=b"")

    def poll(self, *, last: bool = False) -> Iterator[str]:
        """New whole lines; with `last` also a last line without its end."""
        try:
            with self.file.path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if size < self.offset:
                    self.offset, self.partial = 0, b""
                stream.seek(self.offset)
                while chunk := stream.read(1 << 18):
                    self.offset += len(chunk)
                    yield from self._split(chunk)
        except OSError:
            return
        if last and self.partial:
            yield _text(self.partial)
            self.partial = b""

    def _split(self, chunk: bytes) -> Iterator[str]:
        *lines, self.partial = (self.partial + chunk).split(b"\n")
        for line in lines:
            yield _text(line)
        while len(self.partial) > LONGEST_LINE:
            yield _text(self.partial[:LONGEST_LINE])
            self.partial = self.partial[LONGEST_LINE:]


def log_files(run: RunDir, *, rank: int | None = None, attempt: int | None = None) -> list[LogFile]:
    """Log files of an attempt (default: the newest) in the order in which they are shown; one rank's only
    when `rank` is given, whether its file exists yet or not.

    Raises UsageError, naming what there is, when there is no such attempt or rank.
    """
    numbers = run.attempt_numbers()
    if attempt is not None and attempt not in numbers:
        names = ", ".join(map(str, numbers))
        hint = f"attempts of this run: {names}" if numbers else "no attempt has started yet"
        raise UsageError(f"run {run.run_id} has no attempt {attempt}", where="--attempt", hint=hint)
    world_size = read_job_facts(run).world_size
    if rank is not None and world_size is not None and rank >= world_size:
        hint = f"its ranks are 0 to {world_size - 1}"
        raise UsageError(f"run {run.run_id} has no rank {rank}", where="--rank", hint=hint)
    chosen = attempt or (numbers[-1] if numbers else None)
    if rank is not None:
        return [LogFile(f"rank {rank}", run.attempt(chosen).rank_log(rank), chosen)] if chosen else []
    files = (
        [LogFile(_label(path), path, chosen) for path in sorted(_entries(run.attempt(chosen)), key=_order)]
        if chosen
        else []
    )
    if chosen and (told := run.attempt(chosen).post_mortem_text).exists():
        files.insert(0, LogFile("post-mortem", told, chosen))
    return files if attempt else [*files, LogFile("supervisor", run.supervisor_log)]


def run_over(run: RunDir) -> Callable[[], bool]:
    """A function that tells whether the run is over; it may be asked again and again."""
    reader = RunReader(run)

    def over() -> bool:
        reader.advance()
        return reader.view().status.is_over

    return over


def read_logs(files: Sequence[LogFile], *, lines: int | None = None, prefix: bool = True) -> Iterator[str]:
    """Lines of all files, one file after the other; only the last `lines` of each when given."""
    for file, line in log_lines(files, lines):
        yield _labelled(file, line, prefix)


def log_lines(files: Sequence[LogFile], lines: int | None = None) -> Iterator[tuple[LogFile, str]]:
    """What `read_logs` tells, each line with the file that it stands in."""
    for file in files:
        for line in last_lines(file.path, lines):
            yield file, line


def follow_logs(
    files: Callable[[], Sequence[LogFile]],
    *,
    lines: int | None = None,
    prefix: bool = True,
    ended: Callable[[], bool] = lambda: False,
    poll_seconds: float = POLL_SECONDS,
) -> Iterator[str]:
    """Last lines of all files, then new ones as they appear, also in files that appear later (a new
    attempt's).

    Ends when `ended()` says so and everything was read.
    """
    tails: dict[Path, LogTail] = {}
    first = True
    while True:
        over = ended()
        for file in files():
            if file.path not in tails:
                start = _offset_of_last(file.path, lines) if first and lines is not None else 0
                tails[file.path] = LogTail(file, start)
        for tail in tails.values():
            for line in tail.poll(last=over):
                yield _labelled(tail.file, line, prefix)
        if over:
            return
        first = False
        time.sleep(poll_seconds)


def last_lines(path: Path, count: int | None) -> Iterator[str]:
    """The last `count` lines of a file (all: None), reading only its end."""
    start = 0 if count is None else _offset_of_last(path, count)
    yield from LogTail(LogFile("", path), start).poll(last=True)


def _offset_of_last(path: Path, count: int) -> int:
    """Where the last `count` lines of a file begin; a last line without its end is a line."""
    try:
        with path.open("rb") as stream:
            place = size = stream.seek(0, os.SEEK_END)
            missing = count
            while place > 0:
                step = min(BLOCK, place)
                place -= step
                stream.seek(place)
                block = stream.read(step)
                # The newline that ends the file ends its last line and begins no other.
                end = step - 1 if place + step == size else step
                newlines = block.count(b"\n", 0, end)
                if newlines >= missing:
                    return place + _nth_last(block, missing, end) + 1
                missing -= newlines
    except OSError:
        return 0
    return 0


def _nth_last(block: bytes, count: int, end: int) -> int:
    """Position of the `count`-th newline before `end` in a block."""
    for _ in range(count):
        end = block.rfind(b"\n", 0, end)
    return end


def _entries(attempt: AttemptDir) -> list[Path]:
    try:
        return [path for path in attempt.logs.iterdir() if path.suffix == ".log"]
    except OSError:
        return []


def _order(path: Path) -> tuple[int, str]:
    """Nodes and agents before ranks: what went wrong before a rank could log stands first."""
    return (1 if path.name.startswith("rank-") else 0, path.name)


def _label(path: Path) -> str:
    word, _, number = path.stem.partition("-")
    return f"{word} {int(number)}" if number.isdigit() else path.stem


def _labelled(file: LogFile, line: str, prefix: bool) -> str:
    return f"[{file.label}] {line}" if prefix else line


def _text(line: bytes) -> str:
    """The line as text: of a progress bar its last state, bytes that are no UTF-8 as escapes."""
    text = line.decode("utf-8", errors="backslashreplace").rstrip("\r")
    return text.rpartition("\r")[2]
