"""Whole invented runs in the states that a person meets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmtrain.events import schema, watching
from llmtrain.events.event import Event
from llmtrain.observe.run_reader import RunView, read_view
from llmtrain.run.layout import RunDir
from tests.support.run_folder import LAYOUT, abandon, make_run, supervise, write_attempt
from tests.support.sample_events import START, attempt_files, event


@dataclass(frozen=True)
class Story:
    """A run and the moment at which it is looked at."""

    run: RunDir
    now: float

    def view(self) -> RunView:
        return read_view(self.run, now=self.now)


def _running(folder: Path) -> Story:
    run = make_run(folder / "tiny-0001", steps=60)
    files = attempt_files(1, restored=0, steps=28, world_size=8)
    started = schema.AttemptStarted(world_size=8, nodes=("localhost",), layout=LAYOUT, reason="first")
    files["supervisor.jsonl"][0] = event(started)
    step = next(
        at for at in files["rank-00000.jsonl"] if at.kind == "step_finished" and at.payload.step == 28
    )
    object.__setattr__(step.payload, "mfu", 0.42)
    write_attempt(run, 1, files)
    memory = {"total": 1.2e9, "capacity": 80e9}
    predicted = {"step_seconds": 0.4, "memory_bytes": memory}
    run.plan_json.write_text(json.dumps({"plans": [{"predicted": predicted}]}))
    supervise(run)
    return Story(run, START + 17)


def _restarting(folder: Path) -> Story:
    run = make_run(folder / "tiny-0002", steps=60)
    write_attempt(run, 1, attempt_files(1, restored=0, steps=28, world_size=8, outcome="failed"))
    supervise(run)
    return Story(run, START + 18)


def _restarted(folder: Path) -> Story:
    run = make_run(folder / "tiny-0003", steps=60)
    write_attempt(run, 1, attempt_files(1, restored=0, steps=28, world_size=8, outcome="failed"))
    write_attempt(run, 2, attempt_files(2, restored=25, steps=16, world_size=8, start=START + 20))
    supervise(run)
    return Story(run, START + 32)


def _finished(folder: Path) -> Story:
    run = make_run(folder / "tiny-0004", steps=30)
    files = attempt_files(1, restored=0, steps=30, world_size=8, outcome="completed")
    for rank in range(8):
        left = event(schema.RankFinished(reason="completed", step=30), time=START + 17.4, rank=rank)
        files[f"rank-{rank:05d}.jsonl"].append(left)
    ended = schema.RunEnded(exit_status=0, message="all 30 steps are done")
    files["supervisor.jsonl"].append(event(ended, time=START + 18))
    write_attempt(run, 1, files)
    return Story(run, START + 3600)


def _failed(folder: Path) -> Story:
    run = make_run(folder / "tiny-0005", steps=60)
    files = attempt_files(1, restored=0, steps=7, world_size=8, outcome="failed")
    broken = schema.RankFailed(
        error="FloatingPointError: loss is not finite\nat step 8", error_class="numeric", step=8
    )
    files["rank-00001.jsonl"].append(event(broken, time=START + 6, rank=1))
    files["supervisor.jsonl"].pop()
    ended = schema.RunEnded(exit_status=93, message="the loss is not finite")
    files["supervisor.jsonl"].append(event(ended, time=START + 7))
    write_attempt(run, 1, files)
    return Story(run, START + 60)


def _interrupted(folder: Path) -> Story:
    run = make_run(folder / "tiny-0006", steps=60)
    write_attempt(run, 1, attempt_files(1, restored=0, steps=12, world_size=8))
    abandon(run)
    return Story(run, START + 600)


def _created(folder: Path) -> Story:
    return Story(make_run(folder / "tiny-0007", steps=60), START)


def _large(folder: Path) -> Story:
    """32 nodes of 8 ranks; one rank slow, one node not there yet."""
    run = make_run(folder / "large-0008", steps=1000)
    job = run.job_json.read_text().replace('"dp": 2, "tp": 2, "pp": 2', '"dp": 4, "tp": 8, "pp": 8')
    run.job_json.write_text(job)
    nodes = tuple(f"gpu-{node:03d}" for node in range(32))
    started = schema.AttemptStarted(
        world_size=256, nodes=nodes, layout=LAYOUT | {"dp": 4, "tp": 8, "pp": 8}, reason="first"
    )
    files = {"supervisor.jsonl": [event(started)]}
    for rank in range(256 - 8):
        node = rank // 8
        here = schema.RankStarted(host=nodes[node], pid=100 + rank, local_rank=rank % 8)
        slow = 9.0 if rank == 77 else 6.0
        own = schema.RankStep(step=3, seconds=10.0, compute_seconds=slow, memory_bytes=70 * 10**9)
        files[f"rank-{rank:05d}.jsonl"] = [
            event(here, time=START + 5, rank=rank),
            event(schema.PhaseStarted(phase="step", step=4), time=START + 70, rank=rank),
            event(own, time=START + 70, rank=rank),
        ]
    write_attempt(run, 1, files)
    supervise(run)
    return Story(run, START + 75)


def _degraded(folder: Path) -> Story:
    """Six nodes of 8 ranks, the fourth of which was lost: five go on, one of them idle."""
    run = make_run(folder / "degraded-0009", steps=100)
    layout = LAYOUT | {"dp": 6, "tp": 4, "pp": 2}
    run.job_json.write_text(run.job_json.read_text().replace('"dp": 2, "tp": 2', '"dp": 6, "tp": 4'))
    run.record_json.write_text(json.dumps({"lost_nodes": ["node4"]}))
    memory = {"total": 1.2e9, "capacity": 80e9}
    predicted = {"step_seconds": 0.4, "memory_bytes": memory}
    run.plan_json.write_text(json.dumps({"plans": [{"predicted": predicted}]}))
    nodes = tuple(f"node{number}" for number in range(1, 7))
    left = tuple(node for node in nodes if node not in ("node4", "node6"))
    stages = ((1, nodes, 0, layout, START), (2, left, 10, layout | {"dp": 4}, START + 20))
    for number, members, restored, degrees, start in stages:
        world_size = 8 * len(members)
        files = attempt_files(number, restored=restored, steps=12, world_size=world_size, start=start)
        started = schema.AttemptStarted(
            world_size=world_size,
            nodes=members,
            layout=degrees,
            reason="first" if number == 1 else SILENT,
            rung=0 if number == 1 else 5,
            idle=() if number == 1 else ("node6",),
            membership="" if number == 1 else RUNG,
        )
        files["supervisor.jsonl"][0] = event(started, time=start, attempt=number)
        if number == 1:
            files["supervisor.jsonl"] += _node4_is_lost(start + 18)
        for rank in range(world_size):
            here = schema.RankStarted(host=members[rank // 8], pid=rank, local_rank=rank % 8)
            files[f"rank-{rank:05d}.jsonl"][0] = event(here, time=start + 1, attempt=number, rank=rank)
        write_attempt(run, number, files)
    supervise(run)
    return Story(run, START + 30)


SILENT = "node node4 is silent for 10 s"
RUNG = (
    "rung of the ladder for 5 nodes, node4 lost: dp6 tp4 pp2 -> dp4 tp4 pp2, 2 micro-batches of 4 a replica; "
    "idle: node6"
)


def _node4_is_lost(when: float) -> list[Event]:
    ended = schema.AttemptEnded(outcome="failed", cause=SILENT, seconds=when + 1 - START)
    left_out = watching.NodeChanged(node="node4", state="quarantined", reason=SILENT, until=when + 61)
    return [
        event(schema.Found(finding="node_silent", message=SILENT, node=3), time=when),
        event(ended, time=when + 1),
        event(left_out, time=when + 1),
        event(schema.Decided(action="restart", reason=SILENT), time=when + 1),
    ]


STORIES: dict[str, Callable[[Path], Story]] = {
    "running": _running,
    "restarting": _restarting,
    "restarted": _restarted,
    "finished": _finished,
    "failed": _failed,
    "interrupted": _interrupted,
    "created": _created,
    "large": _large,
    "degraded": _degraded,
}


@pytest.fixture(params=sorted(STORIES))
def story(request, tmp_path) -> tuple[str, Story]:
    """Every story by name."""
    return request.param, STORIES[request.param](tmp_path)


@pytest.fixture
def tell(tmp_path) -> Callable[[str], Story]:
    """Make one story."""
    return lambda name: STORIES[name](tmp_path)


@pytest.fixture(autouse=True)
def _utc(monkeypatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
