"""`launch --rehearse`: failures on purpose with everything real, and what it says of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

from llmtrain.backends.base import JobHandle, JobState, JobStatus
from llmtrain.cli.main import run
from llmtrain.cli.rehearsal import _table
from llmtrain.config.job import resolve
from llmtrain.errors import UsageError
from llmtrain.plan.make import make_plan
from llmtrain.plan.placement import ranks_on_nodes
from llmtrain.run.layout import RunDir
from llmtrain.run.record import RunRecord, write_record
from llmtrain.supervise.rehearsal import stage as stages
from llmtrain.supervise.rehearsal.rehearse import Outcome, chosen
from llmtrain.supervise.rehearsal.scenarios import ONE_RANK, SCENARIOS, SMALL, Scenario
from llmtrain.supervise.rehearsal.stage import RehearsalError, Stage
from tests.support import launches

NAMES = os.environ.get("LLMTRAIN_REHEARSE", "death")


@pytest.mark.e2e
def test_scenarios_recover(tmp_path: Path) -> None:
    arguments = ("launch", "tiny", "--rehearse", NAMES, "--json")
    out, _ = launches.end(launches.start(tmp_path, *arguments, home=tmp_path), 0, 420.0 * len(chosen(NAMES)))
    told = json.loads(out)["scenarios"]
    assert [each["name"] for each in told] == [scenario.name for scenario in chosen(NAMES)]
    for each in told:
        assert each["recovered"] and not each["skipped"], each
        if each["name"] == "slow":
            assert each["detect_seconds"] >= 0.0 and each["recover_seconds"] is None, each
        else:
            assert 0.0 <= each["detect_seconds"] <= each["recover_seconds"], each
    assert list((tmp_path / "runs").glob("rehearsal-*")) == [], "what went well is cleared away"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_scenario_can_be_planned(scenario: Scenario) -> None:
    cluster = resolve("tiny", "local", SMALL).cluster
    assert cluster.backend.kind == "local" and not scenario.why_not(cluster)
    plan = make_plan(resolve("tiny", "local", [*SMALL, *scenario.overrides, *scenario.places(cluster)]))
    assert plan.plans and not [problem for problem in plan.problems if "inject" in problem.where]


def test_names_of_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen("all") == SCENARIOS
    assert [scenario.name for scenario in chosen("hang, death")] == ["hang", "death"]
    with pytest.raises(UsageError):
        chosen("fire")
    assert run(["launch", "tiny", "--rehearse", "fire"]) == 2
    assert "known: death, hang" in capsys.readouterr().err
    assert run(["launch", "tiny", "--rehearse", "death", "--detach"]) == 2


def test_table_says_what_did_not_recover_and_what_was_left_out() -> None:
    outcomes = [
        Outcome(
            name="death", does="", recovered=True, detect_seconds=0.0312, recover_seconds=7.26, what="rank 1"
        ),
        Outcome(name="slow", does="", recovered=True, detect_seconds=22.0, what="rank 2"),
        Outcome(name="hang", does="", recovered=False, what="the run did not end in time"),
        Outcome(name="lost-node", does="", recovered=False, skipped=True, what="only here"),
    ]
    assert _table(outcomes).splitlines() == [
        "scenario   detected  recovered",
        "death      0.031 s   7.3 s          rank 1",
        "slow       22.0 s    -              rank 2",
        "hang       -         NOT RECOVERED  the run did not end in time",
        "lost-node  -         not rehearsed  only here",
    ]


PROFILE = """\
name: bed
nodes: 4
gpus_per_node: 2
accelerator: cpu
intra_node: {kind: shared-memory}
inter_node: {data: {kind: tcp}, control: {kind: tcp}}
storage: {path: /nowhere/runs, bandwidth: 500 MB/s}
backend: %s
"""
SSH = "{kind: ssh, python: /usr/bin/python3, ssh: {hosts: [a, b, c, d]}}"
SLURM = "{kind: slurm, slurm: {partition: gpu, time: 30m}}"


@pytest.mark.parametrize(
    ("backend", "more", "left_out"),
    [
        (SSH, [], set()),
        (SSH, ["cluster.nodes=2"], {"lost-node", "returned-node"}),
        (SSH, ["cluster.nodes=1"], {"slow", "lost-node", "returned-node"}),
        (SLURM, [], {"lost-node", "returned-node"}),
        (SSH, ["cluster.storage.shared=nodes"], {"corrupt-shard"}),
    ],
)
def test_what_a_cluster_can_rehearse_is_spread_over_its_nodes(
    backend: str, more: list[str], left_out: set[str], tmp_path: Path
) -> None:
    (profile := tmp_path / "bed.yaml").write_text(PROFILE % backend)
    cluster = resolve("tiny", str(profile), [*SMALL, *ONE_RANK, *more]).cluster
    assert {scenario.name for scenario in SCENARIOS if scenario.why_not(cluster)} == left_out
    for scenario in SCENARIOS:
        if scenario.name not in left_out:
            words = [*SMALL, *scenario.overrides, *scenario.places(cluster), *more]
            job = resolve("tiny", str(profile), words)
            layout = make_plan(job).plans[0].layout
            several = min(cluster.nodes, layout.world_size)
            assert len(ranks_on_nodes(layout, job.cluster.gpus_per_node)) == several, scenario.name


def test_what_cannot_be_rehearsed_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (profile := tmp_path / "bed.yaml").write_text(PROFILE % SLURM)
    words = ["launch", "tiny", "--cluster", str(profile), "--rehearse"]
    assert run([*words, "death,lost-node"]) == 2
    assert "`lost-node` cannot be rehearsed here: a rehearsal takes no nodes" in capsys.readouterr().err
    login = ["cluster.backend.slurm.login=head9", "cluster.backend.python=/shared/bin/python"]
    assert run([*words, "death", *launches.sets(*login)]) == 2
    assert "log in to head9 and type the same" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [profile]


class _Queue:
    """A scheduler that says what it is told to."""

    def __init__(self, *states: JobState) -> None:
        self._states = list(states)
        self.cancelled = 0

    def submit(self, run: object, job: object) -> JobHandle:
        return JobHandle(backend="slurm", id="7")

    def poll(self, handle: JobHandle) -> JobStatus:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        return JobStatus(state=state, raw=str(state), reason="Resources")

    def cancel(self, handle: JobHandle) -> None:
        self.cancelled += 1
        self._states = [JobState.CANCELLED]


def _stage(folder: Path, queue: Any, limit: float, said: list[str]) -> Stage:
    (folder / "run").mkdir()
    rehearsed = RunDir(folder / "run")
    write_record(rehearsed, RunRecord(run_id="run", created=0.0))
    made = Stage(rehearsed, cast(Any, None), queue, limit=limit, say=said.append)
    made.start()
    return made


def test_a_queue_is_waited_for_as_long_as_it_takes_and_left_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "POLL_SECONDS", 0.01)
    said: list[str] = []
    queue = _Queue(*[JobState.PENDING] * 20, JobState.RUNNING)
    stage = _stage(tmp_path, queue, 0.1, said)
    with pytest.raises(RehearsalError, match="did not end in time"):
        stage.wait_for_end()
    assert queue._states == [JobState.RUNNING] and said == ["job slurm://7 waits (Resources)"]
    stage.end()
    assert queue.cancelled == 1 and stage.run.stop_file.exists()


def test_a_job_that_is_over_without_a_word_of_its_run_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(stages, "RECORD_SECONDS", 0.05)
    stage = _stage(tmp_path, _Queue(JobState.RUNNING, JobState.NODE_FAILED), 60.0, [])
    with pytest.raises(RehearsalError, match="its job ended \\(node_failed\\) and the run did not"):
        stage.wait_for_end()
