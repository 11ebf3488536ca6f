"""The reducer: what a run looks like after its events, whatever their order, cut or number."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.events import schema, watching
from llmtrain.events.curve import CURVE_POINTS
from llmtrain.events.folds import attempts, checkpoints, nodes, ranks, training
from llmtrain.events.folds.checkpoints import CHECKPOINTS
from llmtrain.events.folds.training import RECENT_STEPS
from llmtrain.events.reader import merge
from llmtrain.events.records import RankStatus
from llmtrain.events.state import MOMENTS, RunState, apply, fold
from tests.support.sample_events import START, attempt_files, event, events, step_finished

DIED = "rank 1 died with signal 9"


def of_files(*attempts) -> RunState:
    streams = [stream for files in attempts for stream in files.values()]
    return fold(merge(streams), RunState(total_steps=20))


FIRST = attempt_files(1, restored=0, steps=8, outcome="failed")
SECOND = attempt_files(2, restored=5, steps=6, start=START + 20)


def test_a_running_first_attempt() -> None:
    state = of_files(attempt_files(1, restored=0, steps=8))
    assert (state.status, state.step, state.total_steps, state.restarts) == ("running", 8, 20, 0)
    assert [point.step for point in state.history.points] == list(range(1, 9))
    assert state.evaluations.last is not None and state.evaluations.last.loss == 3.0
    assert state.checkpoints[-1].name == "step-00000005"
    assert state.tokens_per_second == pytest.approx(4096)
    assert state.eta_seconds == pytest.approx(12 * 0.5, rel=1e-3)
    assert sorted(state.ranks) == [0, 1, 2, 3]
    assert all(state.is_alive(rank) for rank in range(4))
    rank = state.ranks[2]
    assert (rank.phase, rank.step, rank.pid, rank.memory_bytes) == ("step", 8, 1002, 2**30)


def test_replayed_steps_overwrite_and_the_old_attempt_keeps_its_story() -> None:
    state = of_files(FIRST, SECOND)
    assert (state.status, state.step, state.restarts) == ("running", 11, 1)
    assert [point.step for point in state.history.points] == list(range(1, 12))
    assert [point.attempt for point in state.history.points] == [1] * 5 + [2] * 6
    old, new = state.attempts
    assert (old.outcome, old.cause, old.last_step, old.steps) == ("failed", DIED, 8, 8)
    assert (new.restored_step, new.first_step, new.last_step) == (5, 6, 11)
    assert [moment.text for moment in state.moments if moment.attempt == 1][-3:] == [
        DIED,
        f"attempt 1 failed: {DIED}",
        "the next attempt follows",
    ]


def test_step_goes_back_as_soon_as_the_new_attempt_has_its_weights() -> None:
    state = of_files(FIRST)
    assert (state.step, state.status) == (8, "restarting")
    assert state.ranks[1].status is RankStatus.DEAD
    assert not any(state.is_alive(rank) for rank in range(4))
    second = list(merge(SECOND.values()))
    state = apply(state, second[0])
    assert (state.step, state.status, dict(state.ranks)) == (8, "restarting", {})
    restored = next(index for index, found in enumerate(second) if found.kind == "restored")
    state = fold(second[1 : restored + 1], state)
    assert (state.step, state.status) == (5, "restarting")
    assert state.history.last is not None and state.history.last.step == 5


def test_a_checkpoint_that_could_not_be_restored_is_no_longer_the_last() -> None:
    first = attempt_files(1, restored=0, steps=12, outcome="failed")
    second = attempt_files(2, restored=5, steps=1, start=START + 20)
    assert of_files(first).checkpoints[-1].step == 10
    assert of_files(first, second).checkpoints[-1].step == 5


@pytest.mark.parametrize(
    ("exit_status", "word"), [(0, "finished"), (75, "stopped"), (1, "failed"), (93, "failed")]
)
def test_the_end_and_going_on_after_it(exit_status, word) -> None:
    ended = event(schema.RunEnded(exit_status=exit_status, message="bye"), time=START + 19)
    state = apply(of_files(FIRST), ended)
    assert state.status == word and state.ended is not None and state.eta_seconds is None
    again = fold(merge(SECOND.values()), state)
    assert (again.status, again.ended) == ("running", None)


def test_failed_beats_dead_and_keeps_the_error() -> None:
    failed = event(schema.RankFailed(error="ValueError: no", error_class="user_code"), rank=1)
    dead = event(schema.Found(finding="rank_dead", message="exit code 1", rank=1))
    for order in ([failed, dead], [dead, failed]):
        rank = fold(order).ranks[1]
        assert (rank.status, rank.error) == (RankStatus.FAILED, "ValueError: no")


@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_interleaving_of_the_files_gives_the_same_state(shuffler: random.Random) -> None:
    queues = [list(stream) for files in (FIRST, SECOND) for stream in files.values()]
    mixed = []
    while queues:
        queue = shuffler.choice(queues)
        mixed.append(queue.pop(0))
        queues = [rest for rest in queues if rest]
    state, expected = fold(mixed, RunState(total_steps=20)), of_files(FIRST, SECOND)
    for name in (
        "attempt",
        "step",
        "status",
        "ranks",
        "nodes",
        "members",
        "history",
        "evaluations",
        "checkpoints",
    ):
        assert getattr(state, name) == getattr(expected, name), name
    for mine, theirs in zip(state.attempts, expected.attempts, strict=True):
        assert mine.step_seconds == pytest.approx(theirs.step_seconds)
        assert (mine.first_step, mine.last_step, mine.outcome) == (
            theirs.first_step,
            theirs.last_step,
            theirs.outcome,
        )
    assert sorted(m.text for m in state.moments) == sorted(m.text for m in expected.moments)


@settings(deadline=None)
@given(st.lists(events(), max_size=40), st.integers(0, 40))
def test_wild_events_fold_without_error_and_in_pieces_as_at_once(wild, cut) -> None:
    whole = fold(wild)
    pieces = fold(wild[cut:], fold(wild[:cut]))
    assert repr(pieces) == repr(whole)
    assert isinstance(whole.status, str)
    for number in (whole.tokens_per_second, whole.eta_seconds, whole.seconds_per_step):
        assert number is None or isinstance(number, int | float)


def test_apply_leaves_its_argument_alone() -> None:
    before = of_files(FIRST)
    told = repr(before)
    fold(merge(SECOND.values()), before)
    assert repr(before) == told


def test_memory_is_bounded_over_many_steps_and_attempts() -> None:
    state = RunState(total_steps=10**6)
    for step in range(1, 6001):
        attempt = 1 + step // 15
        if step % 15 == 0:
            state = apply(
                state, event(schema.Restored(step=step - 1, checkpoint="c"), attempt=attempt, rank=0)
            )
        state = apply(state, event(step_finished(step), time=START + step, attempt=attempt, rank=0))
        state = apply(state, event(schema.Notice(message="n"), time=START + step, attempt=attempt))
        saved = schema.CheckpointCommitted(step=step, name=str(step), bytes=1, seconds=0.0)
        state = apply(state, event(saved, time=START + step, attempt=attempt, rank=0))
    assert len(state.history.points) <= CURVE_POINTS
    assert state.history.points[0].step == 1 and state.history.points[-1].step > 5900
    assert len(state.recent) <= RECENT_STEPS and state.latest is not None and state.latest.step == 6000
    assert len(state.moments) <= MOMENTS and len(state.checkpoints) <= CHECKPOINTS
    assert len(state.attempts) <= 256 and state.step == 6000


def test_curve_is_thinned_evenly() -> None:
    state = fold(event(step_finished(step), time=START + step, rank=0) for step in range(1, 5001))
    steps = [point.step for point in state.history.points]
    assert steps[0] == 1
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    assert gaps == {8}


def test_loss_that_is_not_finite_is_kept() -> None:
    state = fold([event(step_finished(1, loss=math.nan), rank=0)])
    assert state.latest is not None and math.isnan(state.latest.loss)


def test_a_kind_of_event_has_one_reducer():
    kinds = [kind for family in (attempts, checkpoints, nodes, ranks, training) for kind in family.REDUCERS]
    assert len(kinds) == len(set(kinds))


def node_changed(node: str, state: str, **more) -> watching.NodeChanged:
    return watching.NodeChanged(node=node, state=state, **more)


def test_what_every_node_is_to_the_run_over_attempts() -> None:
    first = schema.AttemptStarted(world_size=2, nodes=("a", "b"), idle=("c",))
    second = schema.AttemptStarted(world_size=2, nodes=("a", "c"))
    told = [
        event(first, time=START),
        event(schema.Found(finding="node_silent", message="b is silent", node=1), time=START + 5),
        event(schema.Found(finding="rank_dead", message="an echo", rank=1), time=START + 5),
        event(node_changed("b", "quarantined", reason="silent", until=START + 65), time=START + 6),
        event(second, time=START + 8, attempt=2),
        event(node_changed("d", "asleep"), time=START + 9, attempt=2),
    ]
    state = fold(told)
    assert {name: str(member.status) for name, member in state.members.items()} == {
        "a": "healthy",
        "b": "quarantined",
        "c": "healthy",
    }
    assert (state.members["b"].reason, state.members["b"].until) == ("silent", START + 65)
    assert [attempt.finding for attempt in state.attempts] == ["node_silent", ""]
    assert fold([*told[4:], *told[:4]]).members == state.members
    back = fold([event(node_changed("b", "healthy"), time=START + 70, attempt=2)], state)
    assert back.members["b"].status == "healthy"
    assert [moment.text for moment in back.moments][-1] == "node b is back"
