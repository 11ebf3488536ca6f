"""The frozen ladder: from plan.json and allowance.json, strictly, the global batch kept on every rung."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmtrain import __version__
from llmtrain.backends.local import LocalBackend
from llmtrain.backends.rehearsed import RehearsedNodes
from llmtrain.errors import InfeasibleError, RunError, UsageError
from llmtrain.plan.document import plan_document
from llmtrain.plan.make import make_plan
from llmtrain.run.atomic import write_json
from llmtrain.run.job_file import JobFile
from llmtrain.run.ladder_file import read_allowance, read_ladder
from llmtrain.run.layout import RunDir
from llmtrain.run.node_history import recall
from llmtrain.run.record import RunRecord
from llmtrain.supervise.decision.allowance import allow_fewer
from llmtrain.supervise.detection.limits import Limits
from llmtrain.supervise.nodes.members import Members
from llmtrain.supervise.nodes.membership import with_losses
from tests.support.breakable import several_nodes


def planned(folder: Path) -> tuple[RunDir, JobFile]:
    """A recipe that fixes all its degrees, over ten nodes of one rank."""
    fixed = ("parallel.dp=5", "parallel.tp=1", "parallel.pp=2", "batch.micro=2")
    spec = several_nodes(folder, *fixed, nodes=10)
    plan = make_plan(spec)
    run = RunDir(folder)
    write_json(run.plan_json, plan_document(plan))
    return run, JobFile(run_id="r", version=__version__, spec=spec, layout=plan.plans[0].layout)


def test_a_recipe_that_fixes_all_degrees_steps_down_in_dp_first(tmp_path: Path) -> None:
    run, job = planned(tmp_path)
    rungs = read_ladder(run, 16)
    assert [(r.nodes, r.layout.dp, r.layout.pp) for r in rungs if r.layout] == [
        (10, 5, 2),
        (9, 4, 2),
        (8, 4, 2),
    ]
    assert rungs[0].layout == job.layout
    assert rungs[0].micro_batches == (2, 2, 2, 1, 1)
    assert {2 * sum(rung.micro_batches) for rung in rungs} == {16}


def test_the_ladder_goes_down_to_the_budget_of_the_nodes_that_are_used(tmp_path: Path) -> None:
    """A run may begin on as few: a scheduler is asked for no others."""
    plan = make_plan(several_nodes(tmp_path, "parallel.dp=5", "parallel.tp=1", "parallel.pp=1", nodes=8))
    dps = [(rung.nodes, rung.candidate.layout.dp) for rung in plan.ladder if rung.candidate]
    assert dps == [(8, 5), (7, 5), (6, 5), (5, 5), (4, 4)]


def test_nodes_that_join_at_a_later_start_count_as_nodes_at_launch(tmp_path: Path) -> None:
    run, job = planned(tmp_path)
    allow_fewer(run, job, 8)
    down = run.path / "down"
    down.mkdir()
    (down / "n3").touch()
    record = RunRecord(run_id="r", created=0.0)
    record = Members(run, job, RehearsedNodes(job.spec.cluster, run), Limits()).enter(record)
    assert len(record.nodes) == 9 and not record.lost_nodes
    (down / "n3").unlink()
    (down / "n5").touch()
    record = Members(run, job, RehearsedNodes(job.spec.cluster, run), Limits()).enter(record)
    assert sorted(record.nodes, key=lambda name: int(name[1:])) == [f"n{index}" for index in range(1, 11)]
    assert record.lost_nodes == ("n5",)


def test_what_is_lost_on_purpose_says_nothing_about_nodes_to_other_runs(tmp_path: Path) -> None:
    run, job = planned(tmp_path)
    cluster = job.spec.cluster
    cluster = replace(cluster, storage=replace(cluster.storage, path=str(tmp_path / "storage")))
    job = replace(job, spec=replace(job.spec, cluster=cluster))
    before = RunRecord(run_id="r", created=0.0)
    after = with_losses(before, ["n5"], "gone", 1.0)
    Members(run, job, RehearsedNodes(cluster, run), Limits()).remember(before, after)
    assert not recall(tmp_path / "storage")
    Members(run, job, LocalBackend(cluster), Limits()).remember(before, after)
    assert [(verdict.node, verdict.verdict) for verdict in recall(tmp_path / "storage")] == [("n5", "lost")]


def test_a_person_extends_the_ladder_below_the_budget(tmp_path: Path) -> None:
    run, job = planned(tmp_path)
    before = read_ladder(run, 16)
    allow_fewer(run, job, 3)
    rungs = read_ladder(run, 16)
    assert rungs[:3] == before
    assert [(r.nodes, r.layout.dp) for r in rungs[3:] if r.layout] == [(7, 3), (6, 3), (5, 2), (4, 2), (3, 1)]
    allowed = read_allowance(run)
    assert allowed is not None and allowed.fewest_nodes == 3


def test_what_a_person_may_not_allow(tmp_path: Path) -> None:
    run, job = planned(tmp_path)
    with pytest.raises(UsageError, match="the run has 10 nodes"):
        allow_fewer(run, job, 11)
    with pytest.raises(InfeasibleError) as caught:
        allow_fewer(run, job, 1)  # two stages need two nodes
    assert "nothing fits on 1 node" in str(caught.value)
    assert caught.value.problems[0].hint.startswith("2 nodes are the fewest")
    assert read_allowance(run) is None


def edit(run: RunDir, change: Any) -> None:
    document = json.loads(run.plan_json.read_text())
    change(document)
    run.plan_json.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("ladder"), "holds no ladder"),
        (lambda d: d["ladder"][1].pop("layout"), "holds no ladder"),
        (lambda d: d["ladder"][1]["layout"].update(dpp=3), "dpp"),
        (lambda d: d["ladder"][1]["layout"].update(dp="four"), "dp"),
        (lambda d: d["ladder"][1]["layout"].update(dp=3), "rung for 9 nodes splits the batch"),
        (lambda d: d["ladder"][2].update(micro_batches=[2, 2, 2, 1]), "rung for 8 nodes splits the batch"),
        (lambda d: d["ladder"][2]["layout"].update(micro_batch=3), "does not divide"),
    ],
)
def test_a_ladder_that_was_edited_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    run, _ = planned(tmp_path)
    edit(run, change)
    with pytest.raises(RunError, match=words) as caught:
        read_ladder(run, 16)
    assert str(run.plan_json) in caught.value.text()


def test_a_ladder_that_is_gone_or_torn(tmp_path: Path) -> None:
    run, _ = planned(tmp_path)
    run.plan_json.write_text(run.plan_json.read_text()[:100])
    with pytest.raises(RunError, match="holds no ladder"):
        read_ladder(run, 16)
    run.plan_json.unlink()
    with pytest.raises(RunError, match="no such file"):
        read_ladder(run, 16)
