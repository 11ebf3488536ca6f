"""The launch contract: what a person may rely on, the same on this machine, over SSH and under SLURM."""

from __future__ import annotations

import json

import pytest

from llmtrain.agent.sweep import leftovers
from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from tests.support import stand_in_runs as runs
from tests.support.contract import Place, documents, ended, losses
from tests.support.launches import STEPS

pytestmark = pytest.mark.e2e

FAILURE = {"rank": 1, "step": 2, "attempts": [1, 2, 3], "class": "user_code"}
STATUS_KEYS = {
    *("schema", "run", "state", "step", "steps", "loss", "validation_loss", "tokens_per_second"),
    *("seconds_per_step", "planned_seconds_per_step", "eta_seconds", "layout", "ranks", "lost_nodes"),
    *("attempts", "checkpoint", "goodput", "loss_curve", "events", "complete"),
}
"""What the README promises of `status --json`, whatever the backend adds."""


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_from_a_dry_run_to_the_end(place: Place, undisturbed: dict[int, float]) -> None:
    run = RunDir(place.folder / "runs" / "launched")
    printed, _ = place.launch(run, "--dry-run")
    listed = documents(place.launch(run, "--dry-run", "--json")[0])["files"]
    assert not run.path.exists(), "a dry run writes nothing"

    out, _ = place.launch(run, "--detach", "--json")
    assert documents(out)["job"].startswith(f"{place.kind}://")
    names = [file["path"] for file in listed]
    assert printed == "".join((run.path / name).read_text() for name in names)
    assert [(run.path / name).stat().st_size for name in names] == [file["bytes"] for file in listed]

    _, talk = place.command("resume", run.path, status=2)
    assert "is already supervised by" in talk or "of this run is still there" in talk
    shown = documents(place.command("status", run.path, "--json")[0])
    assert shown.keys() >= STATUS_KEYS
    assert shown["steps"] == STEPS and len(shown["ranks"]) in (0, 8)

    record = ended(run, 400)
    assert (record.exit_status, record.reached_step, record.committed_step) == (0, STEPS, STEPS)
    assert losses(run) == undisturbed and len(undisturbed) == STEPS
    hosts = {event.rank: event.payload.host for event in runs.events(run, "rank_started")}
    assert hosts == place.hosts
    logs = run.attempt(1).logs
    assert sorted(path.name for path in logs.glob("rank-*")) == [f"rank-{rank:05d}.log" for rank in range(8)]
    assert all(not path.read_text() for path in logs.glob("agent-*.log"))
    runs.wait_for(lambda: not leftovers(run.path), 30, "everything to leave")

    shown = documents(place.command("status", run.path, "--json")[0])
    assert (shown["state"], shown["step"]) == ("finished", STEPS)
    _, talk = place.command("resume", run.path)
    assert f"is done: step {STEPS} was the last one" in talk
    place.command("data", "audit", run.path, "--compare", "0")  # Stand-ins read nothing.


def test_a_killed_rank_costs_one_attempt(place: Place) -> None:
    run = place.make("killed", steps=10, step_seconds=0.4)
    place.submit(run)
    runs.wait_for(lambda: runs.step_reached(run, 3), 90, "step 3")
    place.kill_rank(run, 5)
    record = ended(run)
    assert (record.exit_status, record.reached_step) == (0, 10)
    assert [(each.outcome, each.cause) for each in record.attempts] == [
        ("failed", "rank_dead"),
        ("completed", ""),
    ]
    [found] = [event.payload for event in runs.events(run, "found")]
    assert found.rank == 5 and "was killed by SIGKILL" in found.message
    assert {path.parents[1].name for path in run.attempts.glob("*/logs/rank-00005.log")} == {"1", "2"}
    steps = [event.payload.step for event in runs.events(run, "step_finished")]
    assert sorted(set(steps)) == list(range(1, 11)), "no step is left out"
    assert runs.events(run, "restored")[-1].payload.step >= 2
    runs.wait_for(lambda: not leftovers(run.path), 30, "everything to leave")


def test_stop_saves_and_what_is_started_again_goes_on(place: Place) -> None:
    run = place.make("stopped", steps=200, step_seconds=0.2)
    handle = place.submit(run)
    runs.wait_for(lambda: runs.step_reached(run, 3), 90, "step 3")
    _, talk = place.command("stop", run.path)
    assert "stopped as asked; newest checkpoint: step" in talk
    record = ended(run)
    assert (record.exit_status, record.stop_requested) == (75, True)
    assert {event.payload.reason for event in runs.events(run, "rank_finished")} == {"stopped"}
    runs.wait_for(lambda: not leftovers(run.path), 30, "everything to leave")
    assert not run.requeues.exists(), "no scheduler undoes a person's stop"

    place.wait_gone(run, handle)
    behaviour = json.loads((run.path / "behaviour.json").read_text())
    (run.path / "behaviour.json").write_text(json.dumps({**behaviour, "steps": record.reached_step + 3}))
    run.stop_file.unlink(missing_ok=True)  # as `resume` does: until then a stop holds
    place.submit(run)
    runs.wait_for(lambda: read_record(run).exit_status == 0, 90, "the run to be done")
    steps = [event.payload.step for event in runs.events(run, "step_finished")]
    assert steps == list(range(1, record.reached_step + 4)), "no step twice, none left out"


def test_failing_user_code_ends_the_run_with_its_words(place: Place) -> None:
    run = place.make("failing", steps=9, no_checkpoints=True, fail=FAILURE)
    place.submit(run)
    record = ended(run)
    assert record.exit_status == 1
    assert [each.outcome for each in record.attempts] == ["failed", "failed"], "tried twice, and not for ever"
    assert "rank 1 failed in step 2: Boom: it broke" in record.message
    _, talk = place.command("status", run.path)
    assert "Boom: it broke" in place.command("status", run.path)[0] + talk
    runs.wait_for(lambda: not leftovers(run.path), 30, "everything to leave")
