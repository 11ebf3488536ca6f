"""Following a run until it ends, with a terminal and without."""

import io
import json
import threading
import time

import pytest
from rich.console import Console

from llmtrain.events import schema
from llmtrain.events.moments import describe
from llmtrain.events.writer import EventWriter
from llmtrain.observe.terminal_views.progress import Sentences, follow
from llmtrain.observe.terminal_views.watch import watch
from tests.support.run_folder import make_run, supervise, write_attempt
from tests.support.sample_events import attempt_files, event, step_finished


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    made = Console(
        file=out,
        width=100,
        height=30,
        force_terminal=terminal,
        color_system=None,
        highlight=False,
        markup=False,
    )
    return made, out


def play(run, *, exit_status: int = 0, steps: int = 5, attempt: int = 1) -> threading.Thread:
    """Write a short attempt with the real writers, a few events at a time, on a thread of its own."""

    def work() -> None:
        folder = run.attempt(attempt).events
        common = {"run": run.run_id, "attempt": attempt}
        with (
            EventWriter(folder / "supervisor.jsonl", source="supervisor", **common) as supervisor,
            EventWriter(folder / "rank-00000.jsonl", source="rank", rank=0, **common) as rank,
        ):
            supervisor.emit(schema.AttemptStarted(world_size=1, nodes=("localhost",), reason="first"))
            time.sleep(0.1)
            rank.emit(schema.PhaseStarted(phase="build"))
            rank.emit(schema.Restored(step=0, checkpoint=None))
            for step in range(1, steps + 1):
                rank.emit(step_finished(step, seconds=0.03))
                time.sleep(0.03)
            rank.emit(schema.Evaluated(step=steps, loss=3.25, seconds=0.1))
            rank.emit(
                schema.CheckpointCommitted(step=steps, name="step-00000005", bytes=12_000_000, seconds=0.2)
            )
            rank.flush()
            supervisor.emit(schema.AttemptEnded(outcome="completed", seconds=1.0))
            supervisor.emit(schema.RunEnded(exit_status=exit_status, message="all steps are done"))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("exit_status", [0, 1, 75, 93])
def test_plain_lines_tell_the_whole_course_and_the_exit_code_comes_back(tmp_path, exit_status) -> None:
    run = make_run(tmp_path / "tiny-1", steps=5)
    supervise(run)
    made, out = console(terminal=False)
    thread = play(run, exit_status=exit_status)
    assert follow(run, console=made, poll_seconds=0.02) == exit_status
    thread.join()
    lines = [line[10:] if line[2:3] == ":" else line for line in out.getvalue().splitlines()]
    assert lines[0] == "run tiny-1: tiny on local, 5 steps"
    expected = [
        "attempt 1 starts 1 ranks",
        "rank 0: build",
        "starts from the seed",
        "validation loss 3.2500 after step 5",
        "checkpoint step-00000005, 12.0 MB in 200 ms",
        "attempt 1 completed",
    ]
    places = [lines.index(line) for line in expected]
    assert places == sorted(places)
    steps = [line for line in lines if line.startswith("step ")]
    assert steps[0].startswith("step 1/5  loss 5.5000  gradient norm 1  learning rate 1.00e-03")
    assert steps[-1].startswith("step 5/5") and len(steps) == 2, "step lines come at intervals"


def test_a_terminal_gets_the_live_view(tmp_path) -> None:
    run = make_run(tmp_path / "tiny-1", steps=5)
    supervise(run)
    made, out = console(terminal=True)
    thread = play(run)
    assert follow(run, console=made, poll_seconds=0.02) == 0
    thread.join()
    assert "5 of 5" in out.getvalue() and "exit code 0: all steps are done" in out.getvalue()


def test_an_earlier_ending_does_not_end_a_resumed_run(tmp_path) -> None:
    run = make_run(tmp_path / "tiny-1", steps=5)
    stopped = event(schema.RunEnded(exit_status=75, message="stopped"), time=time.time() - 60)
    write_attempt(run, 1, attempt_files(1, restored=0, steps=2) | {"supervisor.jsonl": [stopped]})
    supervise(run)
    made, out = console(terminal=False)
    since = time.time()
    thread = threading.Timer(0.1, lambda: play(run, attempt=2).join())
    thread.start()
    assert follow(run, console=made, since=since, poll_seconds=0.02) == 0
    thread.join()
    assert "stopped" not in out.getvalue()


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [({"exit_status": 75, "message": "node3: [no] answer"}, 75), ({}, 1), (None, 1)],
)
def test_a_supervisor_that_is_gone_without_a_word(tmp_path, recorded, expected) -> None:
    run = make_run(tmp_path / "tiny-1", steps=5)
    if recorded is not None:
        run.record_json.write_text(json.dumps(recorded))
    alive = iter([True, True])
    made, out = console(terminal=False)
    assert follow(run, console=made, is_alive=lambda: next(alive, False), poll_seconds=0.02) == expected
    message = (recorded or {}).get("message", "")
    assert out.getvalue().endswith(f"{message}\n"), "why it left is told, since no event tells it"


def test_watch_leaves_the_last_view_on_the_terminal(tmp_path) -> None:
    run = make_run(tmp_path / "tiny-1", steps=5)
    supervise(run)
    made, out = console(terminal=True)
    thread = play(run)
    watch(run, made, interval=0.02)
    thread.join()
    last = out.getvalue().rpartition("\x1b[?1049l")[2]
    assert "tiny-1  finished" in last and "5 of 5" in last


def test_a_terminal_that_cannot_redraw_gets_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    run = make_run(tmp_path / "tiny-1", steps=5)
    out = console(terminal=True)
    assert out[0].is_dumb_terminal
    thread = play(run)
    assert follow(run, console=out[0], poll_seconds=0.02) == 0
    thread.join()
    assert "step 1/" in out[1].getvalue()


def test_an_error_that_all_ranks_meet_is_spelt_out_once_and_at_the_end() -> None:
    error = "NumericError: step 2: loss nan\n  hint: look at these samples"
    found = "rank 0 failed in step 2: NumericError: step 2: loss nan"
    failed = [
        event(schema.RankFailed(error=error, error_class="numeric"), time=1.0, rank=rank) for rank in (0, 1)
    ]
    ended = event(schema.AttemptEnded(outcome="failed", cause=found), time=2.0)
    last = event(schema.RunEnded(exit_status=93, message=f"{found}\n  hint: look"), time=3.0)
    again = event(schema.AttemptStarted(world_size=2, nodes=("a",), reason="resume"), time=4.0)
    sentences = Sentences()
    said = [
        sentences.told(each, moment.text)
        for each in (*failed, ended, last, again, failed[1])
        if (moment := describe(each)) is not None
    ]
    assert said[0] == "rank 0 failed (numeric): NumericError: step 2: loss nan"
    assert said[1] == "rank 1 failed (numeric): the same error"
    assert said[2].endswith("failed: rank 0 failed in step 2: the same error")
    assert said[3] == f"{found}\n  hint: look"
    assert said[5] == "rank 1 failed (numeric): NumericError: step 2: loss nan", "another attempt"
