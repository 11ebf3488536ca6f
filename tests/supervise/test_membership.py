"""Who runs, in which layout: `choose` as a table, quarantine, and what has to be fit to go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from llmtrain.backends.base import Node
from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.errors import InfeasibleError
from llmtrain.run.job_file import JobFile
from llmtrain.run.ladder_file import Allowance, FrozenRung
from llmtrain.run.record import AttemptRecord, RunRecord
from llmtrain.supervise.nodes.membership import (
    choose,
    due,
    fewest_nodes,
    node_changes,
    with_losses,
    with_returned,
)

BATCH = 16


def layout(dp: int, pp: int = 1) -> Layout:
    return Layout(dp=dp, pp=pp, micro_batch=1)


def job(dp: int, *, pp: int = 1, nodes: int, spares: int = 0, per_node: int = 1) -> JobFile:
    spec = resolve("tiny", "local", [f"batch.global={BATCH}", "faults.node_loss_budget=0.4"])
    cluster = replace(spec.cluster, nodes=nodes, spares=spares, gpus_per_node=per_node)
    return JobFile(run_id="r", version="0", spec=replace(spec, cluster=cluster), layout=layout(dp, pp))


def rung(nodes: int, made: Layout | None) -> FrozenRung:
    split = made.micro_batches(BATCH) if made else ()
    return FrozenRung(nodes=nodes, layout=made, micro_batches=split)


def nodes(count: int) -> tuple[Node, ...]:
    return tuple(Node(name=f"n{index}", address=f"10.0.0.{index}") for index in range(1, count + 1))


FIVE = (rung(5, layout(5)), rung(4, layout(4)), rung(3, layout(3)))
PIPELINES = (rung(6, layout(3, 2)), rung(5, layout(2, 2)), rung(4, layout(2, 2)))
GAP = (rung(5, layout(5)), rung(4, None), rung(3, layout(3)))


@pytest.mark.parametrize(
    ("made", "rungs", "known", "away", "used", "dp", "taken", "idle"),
    [
        (job(5, nodes=5), (), 5, [], "n1 n2 n3 n4 n5", 5, 0, ""),
        # A spare comes first, whatever the ladder holds.
        (job(4, nodes=5, spares=1), FIVE, 5, ["n2"], "n1 n3 n4 n5", 4, 0, ""),
        (job(4, nodes=5, spares=1), FIVE, 5, [], "n1 n2 n3 n4", 4, 0, "n5"),
        (job(5, nodes=5), FIVE, 5, ["n4"], "n1 n2 n3 n5", 4, 4, ""),
        (job(5, nodes=5), FIVE, 5, ["n1", "n4"], "n2 n3 n5", 3, 3, ""),
        # A node that was missing from the start is as good as lost.
        (job(5, nodes=5), FIVE, 4, [], "n1 n2 n3 n4", 4, 4, ""),
        # The peer of a broken pipeline idles, and replaces the next loss without another rung.
        (job(3, pp=2, nodes=6), PIPELINES, 6, ["n6"], "n1 n2 n3 n4", 2, 5, "n5"),
        (job(3, pp=2, nodes=6), PIPELINES, 6, ["n6", "n1"], "n2 n3 n4 n5", 2, 4, ""),
        # Nothing fits on four nodes: three run and one idles.
        (job(5, nodes=5), GAP, 5, ["n3"], "n1 n2 n4", 3, 3, "n5"),
    ],
)
def test_choice(
    made: JobFile,
    rungs: Sequence[FrozenRung],
    known: int,
    away: list[str],
    used: str,
    dp: int,
    taken: int,
    idle: str,
) -> None:
    plan = choose(made, rungs, nodes(known), away, number=3)
    assert " ".join(node.name for node in plan.nodes) == used
    assert (plan.layout.dp, plan.rung, " ".join(plan.idle)) == (dp, taken, idle)
    assert sum(plan.ranks_on_node) == plan.layout.world_size
    assert sum(plan.layout.micro_batches(BATCH)) * plan.layout.micro_batch == BATCH


def test_uneven_last_node_of_a_rung() -> None:
    plan = choose(job(6, nodes=3, per_node=2), (rung(2, layout(3)),), nodes(3), ["n1"], number=2)
    assert ([node.name for node in plan.nodes], plan.ranks_on_node) == (["n2", "n3"], (2, 1))


@pytest.mark.parametrize(
    ("made", "rungs", "away", "words"),
    [
        (job(5, nodes=5), FIVE, [], ""),
        (
            job(5, nodes=5),
            FIVE,
            ["n4"],
            "rung of the ladder for 4 nodes, n4 lost: dp5 -> dp4, 4 micro-batches of 1 a replica",
        ),
        (
            job(5, nodes=5),
            FIVE,
            ["n4", "n5"],
            "rung of the ladder for 3 nodes, n4, n5 lost: dp5 -> dp3, 5 to 6 micro-batches of 1 a replica",
        ),
        (job(4, nodes=5, spares=1), FIVE, ["n2"], "n5 in place of n2, lost"),
        # A lost spare changes nothing.
        (job(4, nodes=5, spares=1), FIVE, ["n5"], ""),
        (
            job(3, pp=2, nodes=5),
            (rung(4, layout(1, 2)),),
            ["n5"],
            "rung of the ladder for 4 nodes, n5 lost: dp3 pp2 -> dp1 pp2, "
            "16 micro-batches of 1 a replica; idle: n3, n4",
        ),
    ],
)
def test_words(made: JobFile, rungs: Sequence[FrozenRung], away: list[str], words: str) -> None:
    assert choose(made, rungs, nodes(5), away, number=2).membership == words


@pytest.mark.parametrize(
    ("rungs", "away", "words"),
    [
        (
            FIVE,
            ["n1", "n2", "n3"],
            "2 of 5 nodes are left, and the ladder ends at 3 nodes (lost: n1, n2, n3)",
        ),
        (
            (rung(5, layout(5)), rung(4, None)),
            ["n2"],
            "4 of 5 nodes are left, and no layout of the ladder fits on 4 nodes (lost: n2)",
        ),
        (FIVE, ["n1", "n2", "n3", "n4", "n5"], "0 of 5 nodes are left"),
    ],
)
def test_nothing_fits(rungs: Sequence[FrozenRung], away: list[str], words: str) -> None:
    with pytest.raises(InfeasibleError, match=r"nodes are left") as caught:
        choose(job(5, nodes=5), rungs, nodes(5), away, number=2)
    assert str(caught.value).startswith(words)


# ---- quarantine
EMPTY = RunRecord(run_id="r", created=0.0, nodes=("n1", "n2", "n3"))


def test_a_lost_node_counts_once_and_waits_longer_each_time() -> None:
    once = with_losses(EMPTY, ["n2", "n2"], "silent", 100.0)
    assert (once.lost_nodes, once.away, once.losses[0].times) == (("n2",), ("n2",), 1)
    assert [due(once, now, 60.0) for now in (159.0, 160.0)] == [(), ("n2",)]
    back = with_returned(once, ["n2"])
    assert (back.lost_nodes, back.away) == (("n2",), ())
    assert due(back, 1e9, 60.0) == ()
    twice = with_losses(back, ["n2", "n1"], "cut", 200.0)
    assert (twice.lost_nodes, twice.away) == (("n2", "n1"), ("n2", "n1"))
    assert [due(twice, now, 60.0) for now in (260.0, 320.0)] == [("n1",), ("n2", "n1")]
    often = twice
    for _ in range(20):
        often = with_losses(often, ["n2"], "cut", 0.0)
    assert due(often, 32 * 60.0, 60.0) == ("n2", "n1")


# ---- what has to be fit
@pytest.mark.parametrize(
    ("attempts", "spares", "at_launch", "allowed", "fewest"),
    [
        (0, 0, 0, None, 5),  # a launch needs all that was planned for
        (0, 1, 0, None, 4),
        (0, 0, 0, 2, 2),
        (1, 0, 5, None, 3),  # the budget: ceil(0.6 x 5)
        (1, 0, 0, None, 3),  # a record from before nodes were kept in it
        (1, 0, 4, None, 3),
        (1, 0, 5, 1, 1),
        (1, 0, 5, 5, 3),  # a person allows more, never less, than the recipe
    ],
)
def test_nodes_that_have_to_be_fit(
    attempts: int, spares: int, at_launch: int, allowed: int | None, fewest: int
) -> None:
    record = RunRecord(
        run_id="r",
        created=0.0,
        attempts=tuple(AttemptRecord(number=n + 1, started=0.0) for n in range(attempts)),
        nodes=tuple(f"n{index}" for index in range(at_launch)),
    )
    allowance = None if allowed is None else Allowance(fewest_nodes=allowed, ladder=())
    assert fewest_nodes(job(5, nodes=5, spares=spares), record, allowance) == fewest


def test_what_is_said_of_nodes_is_said_once() -> None:
    told: dict[str, str] = {}

    def said(record: RunRecord, now: float) -> list[tuple[str, str, str, float | None]]:
        changes = node_changes(told, record, now, 60.0)
        told.update({change.node: change.state for change in changes})
        return [(change.node, change.state, change.reason, change.until) for change in changes]

    assert said(EMPTY, 0.0) == []
    lost = with_losses(EMPTY, ["n2"], "silent for 10 s", 100.0)
    assert said(lost, 100.0) == [("n2", "quarantined", "silent for 10 s", 160.0)]
    assert said(lost, 159.0) == []
    assert said(lost, 161.0) == [("n2", "lost", "silent for 10 s", None)]
    back = with_returned(lost, ["n2"])
    assert said(back, 170.0) == [("n2", "healthy", "it is fit again", None)]
    assert said(back, 171.0) == []
    again = with_losses(back, ["n2"], "silent again", 200.0)
    assert said(again, 200.0) == [("n2", "quarantined", "silent again", 320.0)]


def test_a_loss_that_a_wrong_clock_dated_into_the_future_is_over() -> None:
    record = with_losses(RunRecord(run_id="r", created=0.0), ["n1"], "cut", 1e9)
    assert due(record, 1e9 - 3e8, 60.0) == ("n1",) and not due(record, 1e9 - 1.0, 60.0)


def test_nodes_that_the_layout_leaves_alone_need_not_be_fit() -> None:
    """A scheduler is asked for the others only."""
    record = RunRecord(run_id="r", created=0.0)
    assert fewest_nodes(job(2, nodes=5), record, None) == 2
    assert fewest_nodes(job(5, nodes=5, per_node=2), record, None) == 3
