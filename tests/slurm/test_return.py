"""Nodes that come back, and ranks in standby, on a real SLURM cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from llmtrain.run.layout import RunDir
from llmtrain.run.markers import STANDBY_MARKER
from tests.slurm.conftest import MakeRun, submit
from tests.support import hasty
from tests.support.slurm_beds import SlurmBed
from tests.support.stand_in_runs import events, step_reached, wait_for

pytestmark = pytest.mark.e2e

A_RUNG_LESS = ("faults.node_loss_budget=0.5", "batch.global=12", "cluster.failures.restart=0")


@pytest.fixture
def patient_slurm(slurm_bed: SlurmBed) -> Iterator[SlurmBed]:
    """A cluster that gives a silent node five minutes, Slurm's default; the bed gives ten seconds."""
    text = slurm_bed.conf.read_text()
    slurm_bed.conf.write_text(re.sub(r"(?m)^SlurmdTimeout=.*", "SlurmdTimeout=300", text))
    slurm_bed.slurm("scontrol", "reconfigure")
    yield slurm_bed
    slurm_bed.conf.write_text(text)
    slurm_bed.slurm("scontrol", "reconfigure")


def rungs(run: RunDir) -> list[int]:
    return [event.payload.rung for event in events(run, "attempt_started")]


def told(run: RunDir) -> str:
    return "\n".join(event.payload.message for event in events(run, "notice"))


def waiting(run: RunDir) -> int:
    """Ranks in standby, on all nodes."""
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            argv = process.cmdline()
            count += "rank" in argv and str(run.job_json) in argv and STANDBY_MARKER in process.environ()
    return count


def test_ranks_in_standby_take_over(slurm_bed: SlurmBed, make_run: MakeRun) -> None:
    run = make_run("faults.standby_after=1s", "train.steps=100000", steps=1000, step_seconds=0.2)
    submit(run)
    wait_for(lambda: waiting(run) == 8, 90, "ranks in standby")
    (run.path / "die-1-3").touch()
    wait_for(lambda: step_reached(run, 1, attempt=2), 60, "steps of the next attempt")
    assert "ranks that were waiting in standby go on" in told(run)


if os.environ.get("LLMTRAIN_SLURM_RETURN"):

    def test_a_node_that_was_silent_for_a_while_is_taken_up_again(
        patient_slurm: SlurmBed, make_run: MakeRun
    ) -> None:
        run = make_run(*A_RUNG_LESS, steps=400, step_seconds=0.2)
        hasty.take_over(run)
        submit(run)
        wait_for(lambda: step_reached(run, 3), 60, "step 3")
        patient_slurm.fault("cut", "node3")
        wait_for(lambda: len(rungs(run)) > 1 and rungs(run)[-1] == 3, 90, "the rung for three nodes")
        wait_for(lambda: step_reached(run, 1, len(rungs(run))), 60, "steps on it")
        patient_slurm.fault("heal", "node3")
        wait_for(lambda: rungs(run)[-1] == 0, 120, "all four nodes")
        assert [event.payload.reason for event in events(run, "attempt_started")][-1].startswith(
            "back and fit: node3; the run steps up to the planned layout"
        )
