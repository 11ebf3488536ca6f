"""Validation through a pipeline ends also where messages are done one after the other, and a message is not
over before the other side takes it, as NCCL does large ones."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from llmtrain.engine.parallel.pipeline import evaluation_order

Message = tuple[int, int]
"""Stage that sends it, and micro-batch."""


def messages(rank: int, pp: int, chunks: int, order: Iterable[tuple[int, int]]) -> list[Message]:
    """What a rank receives and sends, in order."""
    found = []
    for chunk, micro_batch in order:
        stage = chunk * pp + rank
        found += [(stage - 1, micro_batch)] if stage else []
        found += [(stage, micro_batch)] if stage < pp * chunks - 1 else []
    return found


def ends(ranks: list[list[Message]]) -> bool:
    """Whether all messages are done when a rank does one only together with its other side."""
    while any(ranks):
        heads = [rank[0] for rank in ranks if rank]
        met = {head for head in heads if heads.count(head) == 2}
        if not met:
            return False
        ranks = [rank[1:] if rank and rank[0] in met else rank for rank in ranks]
    return True


@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_no_rank_waits_for_ever(pp: int, chunks: int) -> None:
    for count in (1, 2, 3, pp, 2 * pp + 1):
        order = list(evaluation_order(chunks, count, pp))
        assert sorted(order) == [(chunk, each) for chunk in range(chunks) for each in range(count)]
        assert [each for chunk, each in order if chunk == chunks - 1] == list(range(count))
        assert ends([messages(rank, pp, chunks, order) for rank in range(pp)])


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_whole_chunks_at_a_time_would_be_a_ring(pp: int) -> None:
    order = [(chunk, each) for chunk in range(2) for each in range(2 * pp)]
    assert not ends([messages(rank, pp, 2, order) for rank in range(pp)])
