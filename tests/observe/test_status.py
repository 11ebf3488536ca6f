"""The status view and its JSON twin, for every state that a person meets."""

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from llmtrain.events import schema
from llmtrain.events.saving import SaveIntervalSet
from llmtrain.events.state import apply
from llmtrain.observe.document import status_document
from llmtrain.observe.run_reader import RunReader
from llmtrain.observe.terminal_views.screen import takes_unicode
from llmtrain.observe.terminal_views.status import Screen, status_screen
from llmtrain.observe.wording import comparison_text
from tests.support.golden import check_golden
from tests.support.run_folder import write_attempt
from tests.support.sample_events import START, attempt_files, event, step_finished

GOLDEN = Path(__file__).parent / "golden"
WORDS = {
    "running": "running",
    "restarting": "restarting",
    "restarted": "running",
    "finished": "finished",
    "failed": "failed",
    "interrupted": "interrupted",
    "created": "created",
    "large": "starting",
    "degraded": "running",
}
KEYS = """
    schema run path state recipe cluster backend step steps loss validation_loss validation_step learning_rate
    grad_norm tokens_per_second seconds_per_step planned_seconds_per_step mfu eta_seconds layout attempt
    restarts supervised exit_status message ranks nodes members lost_nodes attempts checkpoint
    checkpoint_interval goodput loss_curve events reactions events_dropped complete time
"""


def draw(view, width: int, height: int | None = None, *, unicode: bool = True, colour: bool = False) -> str:
    out = io.StringIO()
    system = "standard" if colour else None
    console = Console(
        file=out, width=width, color_system=system, force_terminal=colour, highlight=False, markup=False
    )
    console.print(status_screen(view, Screen(width=width, height=height, unicode=unicode)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_screens_are_as_looked_at(story, width, height) -> None:
    name, told = story
    text = draw(told.view(), width, height)
    assert len(text.splitlines()) <= height
    assert all(len(line) <= width for line in text.splitlines())
    check_golden(GOLDEN / f"{name}-{width}x{height}.txt", text)


def test_every_word_of_the_state_is_there_without_colour_and_in_ascii(story) -> None:
    name, told = story
    text = draw(told.view(), 80, unicode=False)
    assert text.isascii()
    assert WORDS[name] in text.splitlines()[0]


def test_colour_only_adds_escapes(tell) -> None:
    view = tell("restarted").view()
    coloured = draw(view, 120, colour=True)
    assert "\x1b[" in coloured
    assert io.StringIO(coloured).getvalue() != draw(view, 120)


def test_small_terminals_keep_the_most_important_lines(tell) -> None:
    view = tell("restarted").view()
    for height in range(8, 30):
        lines = draw(view, 80, height).splitlines()
        assert len(lines) <= height
        assert lines[0].startswith("tiny-0003  running") and "41 of 60" in lines[1]


def test_after_the_last_step_nothing_is_estimated(tell) -> None:
    view = tell("running").view()
    assert "   eta " in draw(view, 120)
    done = replace(view, state=replace(view.state, total_steps=view.state.step))
    assert done.state.eta_seconds == 0 and " eta " not in draw(done, 120), "it validates and saves"


def test_document_has_stable_keys_and_is_strict_json(story) -> None:
    name, told = story
    document = status_document(told.view())
    assert list(document) == KEYS.split()
    assert document["schema"] == 1 and document["state"] == WORDS[name]
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_document_of_a_restarted_run(tell) -> None:
    document = status_document(tell("restarted").view())
    assert (document["step"], document["steps"], document["restarts"]) == (41, 60, 1)
    assert document["checkpoint"]["name"] == "step-00000040"
    assert document["checkpoint"]["age_seconds"] == pytest.approx(32 - 29.5)
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["failed", None]
    assert [attempt["finding"] for attempt in document["attempts"]] == ["rank_dead", None]
    cost = 3 * 0.5 + 0.6 + 3.4 + 2  # steps done again, noticing, the gap, the next start
    assert document["attempts"][0]["cost_seconds"] == pytest.approx(cost)
    assert document["attempts"][1]["cost_seconds"] is None
    assert [rank["alive"] for rank in document["ranks"]] == [True] * 8
    assert document["ranks"][3]["pid"] == 2003
    split = document["goodput"]
    assert split["lost_seconds"] == pytest.approx(3 * 0.5)
    assert split["productive_seconds"] == pytest.approx(41 * 0.5)
    assert split["start_seconds"] == pytest.approx(2 * 2)
    assert split["detect_seconds"] == pytest.approx(0.5)
    assert split["tear_down_seconds"] == pytest.approx(0.1)
    assert split["gpu_hours"] == pytest.approx(8 * (32 - 3.4) / 3600)
    assert split["cost_seconds_by_cause"] == {"rank_dead": pytest.approx(cost)}
    assert split["down_seconds"] == pytest.approx(20 - 16.6)
    named = {key for key in split if key.endswith("_seconds")} - {"total_seconds"}
    parts = sum(split[key] for key in named)
    assert parts == pytest.approx(split["total_seconds"]) == pytest.approx(32)
    assert not split["estimated"]


def test_the_checkpoint_interval_and_where_it_comes_from(tell) -> None:
    told = tell("running")
    assert status_document(told.view())["checkpoint_interval"] is None
    fixed = SaveIntervalSet(every_steps=50, seconds=60.0)
    measured = SaveIntervalSet(
        seconds=1140.0, source="measured", stall_seconds=1.0, between_failures=691200.0
    )
    write_attempt(told.run, 1, {"rank-00000.jsonl": [event(fixed, rank=0), event(measured, rank=0)]})
    assert status_document(told.view())["checkpoint_interval"] == {
        "steps": None,
        "seconds": 1140.0,
        "source": "measured",
        "stall_seconds": 1.0,
        "between_failures_seconds": 691200.0,
    }
    text = draw(told.view(), 80)
    assert "every 19 min 00 s   a save stalls 1 s, failures every 8 d 00 h" in text
    older = event(fixed, attempt=0, rank=0)
    assert apply(told.view().state, older).save_interval.source == "measured", "files come in any order"


def test_nobody_is_called_alive_when_nobody_supervises(tell) -> None:
    document = status_document(tell("interrupted").view())
    assert not any(rank["alive"] for rank in document["ranks"])
    assert not document["supervised"]


def test_a_loss_that_is_not_finite_is_null(tell) -> None:
    told = tell("running")
    write_attempt(
        told.run,
        1,
        {"rank-00000.jsonl": [event(step_finished(29, loss=float("nan")), time=START + 16.6, rank=0)]},
    )
    document = status_document(told.view())
    assert document["loss"] is None and document["step"] == 29
    assert "nan" in draw(told.view(), 80)


def test_reading_bit_by_bit_equals_reading_at_once(tell) -> None:
    told = tell("restarting")
    reader = RunReader(told.run)
    reader.poll()
    write_attempt(told.run, 2, attempt_files(2, restored=25, steps=3, world_size=8, start=START + 20))
    events = reader.poll()
    assert events and all(found.attempt == 2 for found in events)
    assert reader.poll() == []
    assert reader.state == told.view().state


def test_a_reader_that_may_only_read_sees_the_same(tell) -> None:
    told = tell("restarted")
    before = sorted(path.name for path in told.run.path.rglob("*"))
    status_document(told.view())
    assert sorted(path.name for path in told.run.path.rglob("*")) == before


def test_job_file_of_an_unknown_form_still_shows_the_run(tell) -> None:
    told = tell("running")
    told.run.job_json.write_text('{"schema": 99, "spec": []}')
    document = status_document(told.view())
    assert document["step"] == 28 and document["steps"] is None


def test_a_run_too_big_to_read_is_sampled(tmp_path, tell, monkeypatch) -> None:
    told = tell("restarted")
    steps = 4000
    write_attempt(told.run, 3, attempt_files(3, restored=40, steps=steps, world_size=8, start=START + 40))
    ended = schema.AttemptEnded(outcome="failed", cause="hang", seconds=12.0)
    write_attempt(told.run, 2, {"supervisor.jsonl": [event(ended, time=START + 33, attempt=2)]})
    economical = told.__class__(told.run, START + 5000).view()
    assert not economical.complete
    monkeypatch.setattr("llmtrain.observe.run_reader.WHOLE_BYTES", 1 << 30)
    whole = told.__class__(told.run, START + 5000).view()
    assert whole.complete
    for name in ("step", "attempt", "status", "latest", "ranks", "restarts"):
        assert getattr(economical.state, name) == getattr(whole.state, name), name
    assert [a.outcome for a in economical.state.attempts] == [a.outcome for a in whole.state.attempts]
    assert economical.state.checkpoints[-1] == whole.state.checkpoints[-1]
    points = economical.state.history.points
    assert len(points) > 150 and points[0].step == 1 and points[-1].step > 4000
    largest = max(b.step - a.step for a, b in itertools.pairwise(points))
    assert largest < 2 * steps / 100, "the curve has a hole"
    estimate, exact = (status_document(view)["goodput"] for view in (economical, whole))
    assert estimate["productive_seconds"] == pytest.approx(exact["productive_seconds"], rel=0.01)


@pytest.mark.parametrize(
    ("environment", "encoding", "takes"),
    [
        ({"LC_ALL": "C"}, "utf-8", False),
        ({"LC_ALL": "POSIX", "LANG": "en_US.UTF-8"}, "utf-8", False),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, "utf-8", False),
        ({"LC_CTYPE": "C", "LANG": "en_US.UTF-8"}, "utf-8", False),
        ({"LC_ALL": "C.UTF-8", "LANG": "C"}, "utf-8", True),
        ({"LC_CTYPE": "de_DE.UTF-8", "LANG": "C"}, "utf-8", True),
        ({"LANG": "en_US.UTF-8"}, "utf-8", True),
        ({}, "utf-8", True),
        ({"LANG": "de_DE.ISO-8859-1"}, "iso-8859-1", False),
    ],
)
def test_braille_only_where_it_is_wanted(monkeypatch, environment, encoding, takes) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert takes_unicode(console) is takes


def test_what_every_node_is(tell) -> None:
    members = {entry["node"]: entry for entry in status_document(tell("degraded").view())["members"]}
    states = {name: entry["state"] for name, entry in members.items()}
    assert states == {
        **dict.fromkeys(("node1", "node2", "node3", "node5"), "healthy"),
        "node4": "quarantined",
        "node6": "spare",
    }
    assert members["node4"]["until"] == START + 79
    large = status_document(tell("large").view())["members"]
    assert [entry["node"] for entry in large if entry["state"] == "slow"] == ["gpu-009"]


def test_plan_and_measurement_side_by_side(tell) -> None:
    text = draw(tell("running").view(), 80)
    assert "500 ms a step, 25 % more than planned   MFU 42 %" in text
    assert "1.1 GB on the fullest rank, 11 % less than planned   of 80.0 GB" in text


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (1.0, "as planned"),
        (1.01, "as planned"),
        (0.5, "50 % less than planned"),
        (1.25, "25 % more than planned"),
        (3.14, "3.1 x the plan"),
        (1e9, "far above the plan"),
    ],
)
def test_comparison_words(measured, words) -> None:
    assert comparison_text(measured, 1.0) == words
