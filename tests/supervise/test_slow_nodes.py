"""A node that stays slow: what is done about it, and when nothing is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.run.layout import RunDir
from llmtrain.run.node_history import recall
from llmtrain.run.record import read_record
from llmtrain.supervise.attempts.slow_nodes import SlowNodes, saves
from llmtrain.supervise.detection.stragglers import Straggler
from tests.support import breakable
from tests.support import stand_in_runs as runs

HOUR = 3600.0
STEPS = 220
"""Eight long windows take 82; then there is time to ask the ranks to leave."""


def slow(excess: float = 0.05, *, confirmed: bool = True) -> Straggler:
    return Straggler(rank=3, excess=excess, step=900, peers=7, is_confirmed=confirmed)


def watch(*spares: str, replaces: bool = True, cost: float = 300.0) -> tuple[SlowNodes, dict[str, str]]:
    """Slow nodes of an attempt that is expected to fail in ten hours, and who was convicted."""
    convicted: dict[str, str] = {}
    nodes = SlowNodes(
        replaces=replaces,
        spares=spares,
        pays=lambda excess: saves(excess, 10 * HOUR) > cost,
        convict=convicted.__setitem__,
    )
    return nodes, convicted


def test_what_a_slow_node_costs() -> None:
    assert saves(0.25, 10 * HOUR) == pytest.approx(2 * HOUR)
    assert saves(0.0, 10 * HOUR) == 0.0


def test_a_confirmed_node_gives_its_place_to_a_spare() -> None:
    nodes, convicted = watch("n8", "n9")
    assert nodes.take("n2", slow(confirmed=False)) == "", "a few steps are no reason"
    gain = "n2 is slow: its rank 3 computed 5.0% longer than its peers; n8 takes its place"
    assert nodes.take("n2", slow()) == gain
    assert nodes.take("n2", slow()) == "", "once is enough"
    assert list(convicted) == ["n2"]


@pytest.mark.parametrize(
    ("spares", "replaces", "cost", "is_convicted"),
    [
        ((), True, 300.0, True),  # it comes last at the next restart
        (("n9",), True, 1800.0, True),  # a restart costs more than it saves
        (("n2",), True, 300.0, True),  # the spare is the slow one
        (("n9",), False, 300.0, False),  # the recipe only wants to be told
    ],
)
def test_when_the_attempt_goes_on(
    spares: tuple[str, ...], replaces: bool, cost: float, is_convicted: bool
) -> None:
    nodes, convicted = watch(*spares, replaces=replaces, cost=cost)
    assert nodes.take("n2", slow()) == ""
    assert bool(convicted) == is_convicted


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    runs.clean_up(RunDir(tmp_path / "runs" / "run"))


def play(folder: Path, *overrides: str) -> RunDir:
    """A run of three nodes and a spare, whose second one is slow in the first attempt, to its end."""
    wanted = ("cluster.failures.restart=0", "parallel.dp=3", "parallel.tp=1", "parallel.pp=1")
    rest = ("batch.global=12", "batch.micro=1", "faults.standby=false", *overrides)
    spec = breakable.several_nodes(folder, *wanted, *rest, nodes=4, spares=1)
    run = breakable.make_run(
        folder / "runs" / "run", spec, steps=STEPS, step_seconds=0.03, slow={"rank": 1, "excess": 0.1}
    )
    runs.use_corpus(run, runs.prepared_corpus(folder))
    assert breakable.supervise(run, step_up=0.2).wait(120) == 0
    return run


@pytest.mark.e2e
def test_a_slow_node_is_replaced_without_costing_the_budget(folder: Path) -> None:
    run = play(folder, "faults.slow_ranks=replace", "faults.node_loss_budget=0")
    record = read_record(run)
    assert [attempt.nodes for attempt in record.attempts] == [("n1", "n2", "n3"), ("n1", "n3", "n4")]
    assert [(each.outcome, each.cause) for each in record.attempts] == [
        ("stopped", "replace_slow"),
        ("completed", ""),
    ]
    assert record.lost_nodes == () and record.reached_step == STEPS
    first, last = (event.payload for event in runs.events(run, "attempt_started"))
    assert first.idle == ("n4",) and last.idle == ("n2",)
    assert "n2 is kept as a spare (slow" in last.membership
    steps = [event.payload.step for event in runs.events(run, "step_finished")]
    assert steps == list(range(1, STEPS + 1)), "it saved before it left: no step is done again"
    [verdict] = recall(run.path.parent)
    assert (verdict.node, verdict.verdict, verdict.by) == ("n2", "slow", run.run_id)
    assert [event.payload.confirmed for event in runs.events(run, "slow_rank")] == [False, True]
