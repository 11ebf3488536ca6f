"""Taking a scheduler's job away, while it may begin, and be queued again, at any moment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.backends.base import JobHandle, JobState, JobStatus
from llmtrain.cli import job
from llmtrain.errors import RunError
from llmtrain.run.layout import RunDir


class Queue:
    """A scheduler that says these states one after another, and takes away only a job that waits."""

    def __init__(self, *states: JobState) -> None:
        self.states, self.cancelled = list(states), 0

    def poll(self, handle: JobHandle) -> JobStatus:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return JobStatus(state=state, raw=state.name)

    def cancel(self, handle: JobHandle) -> None:
        self.cancelled += 1
        if self.states[0] == JobState.PENDING:
            self.states = [JobState.CANCELLED]


def end(queue: Queue, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 5.0) -> RunDir:
    monkeypatch.setattr(job, "POLL_SECONDS", 0.001)
    run = RunDir(folder)
    run.stop_file.write_text("now\n")
    job.end_job(run, queue, JobHandle(backend="slurm", id="7"), seconds)  # type: ignore[arg-type]
    return run


def test_a_job_that_is_queued_again_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(JobState.RUNNING, JobState.RUNNING, JobState.PENDING, JobState.PENDING)
    assert end(queue, tmp_path, monkeypatch).stop_file.exists(), "until a resume: it may start yet again"
    assert queue.cancelled == 2


def test_a_job_that_leaves_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator queued it again: it is leaving its nodes, and then waits."""
    queue = Queue(JobState.RUNNING, JobState.PENDING, JobState.PENDING)
    poll = queue.poll

    def leaving_first(handle: JobHandle) -> JobStatus:
        status = poll(handle)
        return replace(status, raw="COMPLETING") if status.state == JobState.RUNNING else status

    queue.poll = leaving_first  # type: ignore[method-assign]
    end(queue, tmp_path, monkeypatch)
    assert queue.cancelled == 2


def test_a_job_that_does_not_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="has not ended in time"):
        end(Queue(JobState.RUNNING), tmp_path, monkeypatch, seconds=0.02)
    assert (tmp_path / "STOP").exists(), "the wish stays"
