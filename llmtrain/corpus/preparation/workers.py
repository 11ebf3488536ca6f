"""Tokenising parts in several processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from llmtrain.corpus.preparation.parts import PartResult, make_part
from llmtrain.corpus.preparation.sources import FileRange
from llmtrain.corpus.tokenizer import Tokenizer, load_tokenizer
from llmtrain.errors import CorpusError


def make_parts(
    work: Path,
    parts: Sequence[tuple[FileRange, ...]],
    missing: Sequence[int],
    *,
    tokenizer_name: str,
    validation_fraction: float,
    workers: int,
) -> Iterator[tuple[int, PartResult]]:
    """Make the missing parts in worker processes, yielding each as it is finished.

    A failure ends the other workers after their current part. Raises as `make_part` does, and CorpusError
    when a worker is killed.
    """
    pool = ProcessPoolExecutor(
        min(workers, len(missing)),
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer_name, os.getpid()),
    )
    try:
        futures = {
            pool.submit(_work_on, work, number, parts[number], validation_fraction): number
            for number in missing
        }
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise CorpusError(
            "a worker process was killed, perhaps for want of memory",
            where=str(work),
            hint="start again: finished parts are kept; fewer workers need less memory",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker_tokenizer: list[Tokenizer] = []


def _start_worker(tokenizer_name: str, parent: int) -> None:
    """One tokenizer a worker, on one core; the worker ends when its parent does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer[:] = [load_tokenizer(tokenizer_name)]
    _leave_with(parent)


def _leave_with(parent: int) -> None:
    """End this process soon after its parent has: a killed parent cannot tell it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work_on(work: Path, number: int, ranges: tuple[FileRange, ...], fraction: float) -> PartResult:
    return make_part(work, number, ranges, tokenizer=_worker_tokenizer[0], validation_fraction=fraction)
