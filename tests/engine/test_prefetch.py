"""Reading ahead: the same batches in the same order, bounded, and ended for certain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import BatchConfig
from llmtrain.corpus.samples import Samples
from llmtrain.corpus.token_file import TokenFile
from llmtrain.engine.data import Batch, TrainingBatches
from llmtrain.engine.device import choose_device
from llmtrain.engine.prefetch import AHEAD, PrefetchedBatches
from llmtrain.errors import CorpusError
from tests.corpus.test_documents_in_order import write_corpus
from tests.support.engine_cases import ZipfWindows

pytestmark = pytest.mark.engine
DEVICE = choose_device(0, "cpu")


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def batches(source: object = None) -> TrainingBatches:
    samples = Samples([source or ZipfWindows()], sequence=32, seed=7)  # type: ignore[list-item]
    return TrainingBatches(samples, BatchConfig(global_size=8), Layout(micro_batch=2), 0)


class Watched:
    """A source that notes what is read, and may be held up or fail."""

    def __init__(self, fails_at: int = 0) -> None:
        self.inner, self.read, self.fails_at = batches(), list[int](), fails_at
        self.micro_batches, self.busiest, self.reading = 4, 4, "/data/train.bin"
        self.gate = threading.Event()
        self.gate.set()

    def use_micro_batch(self, size: int) -> None:
        self.inner.use_micro_batch(size)
        self.micro_batches = self.busiest = self.inner.micro_batches

    def fetch(self, step: int) -> Batch:
        self.read.append(step)
        self.gate.wait()
        if step == self.fails_at:
            raise CorpusError("ends at byte 7", where=self.reading)
        return self.inner.fetch(step)


def threads() -> int:
    return sum(thread.name == "data" for thread in threading.enumerate())


def test_the_same_batches_in_the_same_order() -> None:
    """Also after a jump back, a jump ahead and another micro-batch."""
    ahead, plain = PrefetchedBatches(batches(), DEVICE, 40), batches()
    for step in [*range(3, 12), *range(5, 9), 30, 31, 31, 39, 40, 41]:
        found, expected = ahead.fetch(step), plain.fetch(step)
        assert found.tokens.equal(expected.tokens)
        assert found.targets.equal(expected.targets)
        assert found.digest == expected.digest
    ahead.use_micro_batch(4)
    plain.use_micro_batch(4)
    assert (ahead.micro_batches, ahead.busiest) == (2, 2)
    assert ahead.fetch(42).tokens.equal(plain.fetch(42).tokens)
    ahead.close()
    assert not threads()


def test_it_reads_a_few_steps_ahead_and_never_past_the_last() -> None:
    source = Watched()
    ahead = PrefetchedBatches(source, DEVICE, 100)
    ahead.fetch(1)
    eventually(lambda: len(source.read) == AHEAD + 2)
    time.sleep(0.2)
    assert source.read == [1, 2, 3, 4]
    ahead.close()
    source = Watched()
    ahead = PrefetchedBatches(source, DEVICE, 2)
    ahead.fetch(1)
    eventually(lambda: not threads())
    assert source.read == [1, 2]
    ahead.fetch(2)
    ahead.close()


def test_closing_ends_the_thread_whatever_it_does() -> None:
    source = Watched()
    ahead = PrefetchedBatches(source, DEVICE, 100)
    ahead.fetch(1)
    ahead.close()
    ahead.close()
    eventually(lambda: not threads())
    read = list(source.read)
    time.sleep(0.2)
    assert source.read == read


def test_a_failure_comes_at_its_step_and_not_before() -> None:
    ahead = PrefetchedBatches(Watched(fails_at=3), DEVICE, 100)
    ahead.fetch(1)
    ahead.fetch(2)
    with pytest.raises(CorpusError, match="ends at byte 7"):
        ahead.fetch(3)
    ahead.close()
    assert not threads()


def test_a_read_that_never_returns_is_named() -> None:
    source = Watched()
    source.gate.clear()
    ahead = PrefetchedBatches(source, DEVICE, 100, stall_seconds=0.2)
    with pytest.raises(CorpusError, match="gave no data for 0 s") as raised:
        ahead.fetch(1)
    assert "/data/train.bin" in raised.value.text()
    source.gate.set()
    ahead.close()


def test_a_torn_file_is_named_after_bounded_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "c", [[list(range(500))]]).close()
    tokens = TokenFile.open(tmp_path / "c")
    ahead = PrefetchedBatches(batches(tokens), DEVICE, 100)
    assert ahead.fetch(1).tokens.shape == (8, 32)
    ahead.close()
    with (tmp_path / "c.bin").open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(CorpusError) as raised:
        for step in range(1, 9):
            ahead.fetch(step)
    assert str(tmp_path / "c.bin") in raised.value.text()
    ahead.close()


def test_a_disk_that_comes_back_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmtrain.corpus import token_file

    write_corpus(tmp_path / "c", [[list(range(500))]]).close()
    tokens = TokenFile.open(tmp_path / "c")
    whole, failures = token_file._read_all, [2]

    def shaky(descriptor: int, begin: int, size: int) -> bytes:
        if failures[0]:
            failures[0] -= 1
            raise OSError(5, "Input/output error")
        return whole(descriptor, begin, size)

    monkeypatch.setattr(token_file, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(token_file, "_read_all", shaky)
    assert np.array_equal(tokens.read(3, 5), [3, 4, 5, 6, 7])
    failures[0] = 99
    with pytest.raises(CorpusError, match="cannot be read after 4 tries: Input/output error"):
        tokens.read(3, 5)
