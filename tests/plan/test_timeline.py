"""The drawn schedules: their bubble is the predicted one, and their order is the one that the engine runs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from llmtrain.plan.timing.schedules import bubble_ratio, micro_batches_in_flight
from llmtrain.plan.timing.timeline import Pass, order, timeline

CASES = [
    ("1f1b", stages, 1, micro) for stages in (1, 2, 4, 8) for micro in (1, 2, 4, 7, 8, 32) if micro >= stages
] + [
    ("interleaved", stages, chunks, rounds * stages)
    for stages in (2, 4, 8)
    for chunks in (2, 3, 4)
    for rounds in (1, 2, 4)
]
ZERO_BUBBLE = [("zero-bubble", stages, 1, micro) for stages in (2, 4, 8) for micro in (8, 9, 16, 32)]


@pytest.mark.parametrize("case", [*CASES, *ZERO_BUBBLE], ids=str)
def test_the_bubble_drawn_is_the_bubble_predicted(case: tuple[str, int, int, int]) -> None:
    schedule, stages, chunks, micro_batches = case
    drawn = timeline(*case)
    passes = 3 if schedule == "zero-bubble" else 2
    assert len(drawn.slots) == passes * stages * chunks * micro_batches
    assert drawn.bubble_ratio == pytest.approx(bubble_ratio(schedule, stages, chunks, micro_batches))


@pytest.mark.parametrize("case", [*CASES, *ZERO_BUBBLE], ids=str)
def test_passes_follow_what_they_need_and_a_stage_does_one_at_a_time(case: tuple[str, int, int, int]) -> None:
    drawn = timeline(*case)
    at = {slot.done: slot for slot in drawn.slots}
    last = drawn.stages * case[2] - 1
    for slot in drawn.slots:
        done = slot.done
        if done.work == "forward" and done.chunk:
            assert at[Pass("forward", done.chunk - 1, done.micro_batch)].stop <= slot.start + 1e-9
        if done.work == "backward" and done.chunk < last:
            assert at[Pass("backward", done.chunk + 1, done.micro_batch)].stop <= slot.start + 1e-9
    for stage in range(drawn.stages):
        own = [slot for slot in drawn.slots if slot.stage == stage]
        assert all(a.stop <= b.start + 1e-9 for a, b in pairwise(own))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_alive_micro_batches_are_those_that_memory_is_planned_for(case: tuple[str, int, int, int]) -> None:
    schedule, stages, chunks, micro_batches = case
    for stage in range(stages):
        alive = peak = 0
        for each in order(schedule, stages, chunks, micro_batches, stage):
            alive += 1 if each.work == "forward" else -1
            peak = max(peak, alive)
        planned = micro_batches_in_flight(schedule, stages, chunks, micro_batches, stage)
        assert peak == pytest.approx(planned * chunks)


def test_micro_batches_that_do_not_fit_make_no_drawing() -> None:
    assert timeline("interleaved", 4, 2, 11).slots == ()


@pytest.mark.engine
@pytest.mark.parametrize("case", [*CASES[-27:], *ZERO_BUBBLE], ids=str)
def test_the_order_is_that_of_the_schedules_that_the_engine_runs(case: tuple[str, int, int, int]) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule, stages, chunks, micro_batches = case
    name = "ScheduleInterleavedZeroBubble" if schedule == "zero-bubble" else "ScheduleInterleaved1F1B"
    theirs = object.__new__(getattr(schedules, name))
    theirs.n_local_stages, theirs.pp_group_size, theirs._n_microbatches = chunks, stages, micro_batches
    theirs.number_of_rounds = max(1, micro_batches // stages)
    theirs.microbatches_per_round = micro_batches // theirs.number_of_rounds
    kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "backward"}
    for stage in range(stages):
        listed = [
            Pass(
                kinds.get(action.computation_type.name, "weight"), action.stage_index, action.microbatch_index
            )
            for action in theirs._calculate_single_rank_operations(stage)
            if action is not None
        ]
        assert list(order(schedule, stages, chunks, micro_batches, stage)) == listed
