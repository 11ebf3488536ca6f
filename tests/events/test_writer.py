"""The writer on a real disk: nothing lost in order, nothing blocked when the disk or the queue is full."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmtrain.events.event import LINE_LIMIT
from llmtrain.events.reader import read_events
from llmtrain.events.schema import EventsDropped, Notice
from llmtrain.events.writer import EventWriter


def writer(path: Path, **options) -> EventWriter:
    return EventWriter(path, run="run", attempt=1, source="rank", rank=0, **options)


def test_events_arrive_in_order_with_consecutive_numbers(tmp_path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    with writer(path) as out:
        for index in range(500):
            out.emit(Notice(message=str(index)))
    found = list(read_events(path))
    assert [event.payload.message for event in found] == [str(index) for index in range(500)]
    assert [event.seq for event in found] == list(range(500))
    assert out.dropped == 0


def test_flush_makes_events_visible_to_others(tmp_path) -> None:
    out = writer(tmp_path / "rank.jsonl")
    out.emit(Notice(message="here"))
    assert out.flush(5)
    assert [event.payload.message for event in read_events(tmp_path / "rank.jsonl")] == ["here"]
    out.close()


def test_full_queue_drops_counts_and_says_so_later(tmp_path, monkeypatch) -> None:
    gate, real = threading.Event(), os.write

    def slow(file: int, line: bytes) -> int:
        gate.wait(10)
        return real(file, line)

    monkeypatch.setattr(os, "write", slow)
    out = writer(tmp_path / "rank.jsonl", capacity=10)
    began = time.perf_counter()
    for index in range(100):
        out.emit(Notice(message=str(index)))
    assert time.perf_counter() - began < 1, "emit must not wait for the disk"
    dropped = out.dropped
    assert dropped >= 100 - 2 * 10
    gate.set()
    assert out.close()
    found = list(read_events(tmp_path / "rank.jsonl"))
    told = sum(event.payload.count for event in found if isinstance(event.payload, EventsDropped))
    written = [event.payload.message for event in found if isinstance(event.payload, Notice)]
    assert told == dropped == out.dropped
    assert len(written) + dropped == 100
    assert written == sorted(written, key=int)


FULL_DISK = """
import resource, signal, sys, time
from pathlib import Path
from llmtrain.events.schema import Notice
from llmtrain.events.writer import EventWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
limit(1000)
out = EventWriter(Path(sys.argv[1]), run="run", attempt=1, source="rank", rank=0, capacity=100)
for index in range(50):
    out.emit(Notice(message=f"before {index}"))
"""
"""A limit on the file size stands for the full disk: writes come back short, then fail."""


def on_full_disk(path: Path, code: str) -> list[str]:
    """What a program printed that goes on from a full disk."""
    command = [sys.executable, "-c", FULL_DISK + code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_disk_that_is_full_for_a_while_costs_no_event(tmp_path) -> None:
    path = tmp_path / "rank.jsonl"
    code = """
assert not out.flush(1.0)
limit(resource.RLIM_INFINITY)
out.emit(Notice(message="after"))
assert out.close()
print(out.dropped)
"""
    assert on_full_disk(path, code) == ["0"]
    found = list(read_events(path))
    assert [event.payload.message for event in found] == [
        *(f"before {index}" for index in range(50)),
        "after",
    ]
    assert [event.seq for event in found] == list(range(51))


def test_disk_that_stays_full_costs_what_the_queue_cannot_hold(tmp_path) -> None:
    path = tmp_path / "rank.jsonl"
    code = """
out.flush(0.5)
for index in range(500):
    out.emit(Notice(message="more"))
lost = out.dropped
limit(resource.RLIM_INFINITY)
assert out.close()
print(lost, out.dropped)
"""
    lost, dropped = map(int, on_full_disk(path, code))
    assert lost == dropped >= 500 - 100
    found = [event.payload for event in read_events(path)]
    assert [payload.count for payload in found if isinstance(payload, EventsDropped)] == [lost]
    assert sum(isinstance(payload, Notice) for payload in found) == 550 - lost


def test_closing_does_not_wait_for_a_full_disk_for_ever(tmp_path) -> None:
    code = """
began = time.monotonic()
assert out.close(1.0)
print(int(time.monotonic() - began), out.dropped)
"""
    seconds, dropped = map(int, on_full_disk(tmp_path / "rank.jsonl", code))
    assert seconds < 10 and 40 < dropped < 50


class Server:
    """A file server: what was opened before it came back is stale, and it may have lost the end of a file."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.is_away, self.stale = path, False, set[int]()
        self.real_write, self.real_open = os.write, os.open
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "open", self.open)

    def write(self, file: int, line: bytes) -> int:
        if file in self.stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return self.real_write(file, line)

    def open(self, path: str | Path, *rest: int) -> int:
        if self.is_away and Path(path) == self.path:
            raise OSError(errno.ESTALE, "Stale file handle")
        file = self.real_open(path, *rest)
        self.stale.discard(file)
        return file

    def crash(self, descriptor: int, lost: slice = slice(0, 0)) -> None:
        """Leave, and come back later without some bytes; a part of the file is a hole if more follows."""
        self.is_away = True
        self.stale.add(descriptor)
        data = bytearray(self.path.read_bytes())
        begin, end, _ = lost.indices(len(data))
        data[begin:end] = bytes(end - begin) if end < len(data) else b""
        self.path.unlink()
        self.path.write_bytes(data)


@pytest.mark.parametrize(
    "lost", [slice(0, 0), slice(-300, None), slice(-1, None), slice(-900, -500), slice(0, None)]
)
def test_a_file_server_that_comes_back_costs_no_event_and_doubles_none(tmp_path, monkeypatch, lost) -> None:
    path = tmp_path / "rank.jsonl"
    server = Server(path, monkeypatch)
    monkeypatch.setattr("llmtrain.events.writer.RETRY_SECONDS", 0.02)
    with writer(path) as out:
        for round_ in range(2):
            for index in range(20):
                out.emit(Notice(message=f"{20 * round_ + index}"))
            assert out.flush(10)
            server.crash(out._file._file, lost)
            out.emit(Notice(message="while away"))
            assert not out.flush(0.1)
            server.is_away = False
            assert out.flush(10)
        assert not out.dropped
    found = [event.seq for event in read_events(path)]
    assert sorted(found) == list(range(42))
    assert all(found[index] < found[index + 1] for index in range(41)) or lost.stop == -500


def test_a_line_that_was_taken_though_the_disk_said_no_is_not_doubled(tmp_path, monkeypatch) -> None:
    path = tmp_path / "rank.jsonl"
    real, failures = os.write, iter([True, False, True, True])

    def write(file: int, line: bytes) -> int:
        written = real(file, line)
        if next(failures, False):
            raise OSError(errno.EIO, "an earlier line was lost")
        return written

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr("llmtrain.events.writer.RETRY_SECONDS", 0.02)
    with writer(path) as out:
        for _ in range(5):
            out.emit(Notice(message="once"))
    assert [event.seq for event in read_events(path)] == list(range(5))


def test_a_loss_that_shows_when_the_file_is_closed_is_made_up_for(tmp_path, monkeypatch) -> None:
    path = tmp_path / "rank.jsonl"
    out, real = writer(path), os.close
    out.emit(Notice(message="last"))
    assert out.flush()
    descriptor = out._file._file

    def close(file: int) -> None:
        real(file)
        if file == descriptor:
            monkeypatch.setattr(os, "close", real)
            os.truncate(path, 0)
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", close)
    assert out.close()
    assert [event.payload.message for event in read_events(path)] == ["last"]


def test_only_the_end_of_a_file_is_remembered_and_read_again(tmp_path, monkeypatch) -> None:
    path = tmp_path / "rank.jsonl"
    monkeypatch.setattr("llmtrain.events.line_file.REMEMBERED_BYTES", 1000)
    out = writer(path)
    for index in range(100):
        out.emit(Notice(message=f"{index:04d}"))
    assert out.flush()
    begin = out._file._recent[0][0]
    assert 0 < path.stat().st_size - begin <= 1000
    os.close(out._file._file)  # by somebody else
    out.emit(Notice(message="0100"))
    assert out.close()
    assert [event.seq for event in read_events(path)] == list(range(101))


def test_torn_last_line_of_an_earlier_writer_is_closed_first(tmp_path) -> None:
    path = tmp_path / "rank.jsonl"
    with writer(path) as out:
        out.emit(Notice(message="whole"))
    with path.open("ab") as file:
        file.write(b'{"v":1,"time":12')
    with writer(path) as out:
        out.emit(Notice(message="next"))
    assert [event.payload.message for event in read_events(path)] == ["whole", "next"]


def test_closed_writer_counts_and_close_is_idempotent(tmp_path) -> None:
    out = writer(tmp_path / "rank.jsonl")
    assert out.close() and out.close()
    out.emit(Notice(message="late"))
    assert out.dropped == 1


def test_an_event_longer_than_a_reader_takes_is_dropped_and_said(tmp_path) -> None:
    with writer(tmp_path / "rank.jsonl") as out:
        out.emit(Notice(message="x" * LINE_LIMIT))
        out.emit(Notice(message="short"))
    kinds = [event.kind for event in read_events(tmp_path / "rank.jsonl")]
    assert kinds == ["events_dropped", "notice"]


def test_emit_inside_a_signal_handler_does_not_deadlock(tmp_path) -> None:
    out = writer(tmp_path / "rank.jsonl", capacity=1_000_000)
    before = signal.signal(signal.SIGALRM, lambda *_: out.emit(Notice(message="signal")))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for _ in range(5000):
            out.emit(Notice(message="loop"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert out.close()
    messages = [event.payload.message for event in read_events(tmp_path / "rank.jsonl")]
    assert messages.count("loop") == 5000


def test_events_of_a_process_that_ends_without_close_are_written(tmp_path) -> None:
    path = tmp_path / "rank.jsonl"
    code = (
        "import sys; from pathlib import Path\n"
        "from llmtrain.events.schema import Notice; from llmtrain.events.writer import EventWriter\n"
        "out = EventWriter(Path(sys.argv[1]), run='run', attempt=1, source='rank', rank=0)\n"
        "out.emit(Notice(message='last words')); raise RuntimeError('no close')"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, timeout=60, check=False)
    assert [event.payload.message for event in read_events(path)] == ["last words"]


def _write_many(path: Path, name: str) -> None:
    with EventWriter(path, run="run", attempt=1, source=name) as out:
        for index in range(200):
            out.emit(Notice(message=f"{name} {index} " + "x" * 500))


def test_lines_of_several_processes_never_mix(tmp_path) -> None:
    path = tmp_path / "shared.jsonl"
    context = multiprocessing.get_context("spawn")
    names = ("agent", "supervisor")
    processes = [context.Process(target=_write_many, args=(path, name)) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    found = list(read_events(path))
    for name in names:
        numbers = [int(event.payload.message.split()[1]) for event in found if event.source == name]
        assert numbers == list(range(200))


def test_a_folder_that_cannot_be_made_raises_at_once(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        writer(tmp_path / "file" / "rank.jsonl")
