"""The HTML report: well formed, self-contained, escaped, and drawn by a real browser."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.cli.main import run as run_command
from llmtrain.config.job import resolve
from llmtrain.config.layout_text import parse_layout
from llmtrain.events import schema
from llmtrain.events.trace import Span, TracePlace, header_lines, span_lines
from llmtrain.observe.html.plan_page import drawable, plan_page
from llmtrain.observe.html.report import report_page
from llmtrain.observe.html.svg import Axis, Series, bar_plot, line_plot, share_bar
from llmtrain.observe.wording import bytes_text
from llmtrain.plan.make import make_plan
from llmtrain.plan.timing.schedules import bubble_ratio
from llmtrain.plan.timing.timeline import timeline
from tests.support.run_folder import LAYOUT, write_attempt
from tests.support.sample_events import START, event

VOID = {"meta", "br"}
LAYOUTS = {
    "1f1b": "dp=8,tp=8,pp=4,micro_batch=1,recompute=full",
    "interleaved": "dp=8,tp=8,pp=4,vpp=2,micro_batch=1,recompute=full",
    "zero-bubble": "dp=4,tp=8,pp=8,schedule=zero-bubble,micro_batch=1,sequence_parallel=true",
    "no pipeline": "dp=32,tp=8,pp=1,zero=3,micro_batch=1,recompute=full",
}


class Page(HTMLParser):
    """Checks nesting, and collects tags, texts and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.texts.append(data)


def test_every_story_makes_a_whole_page_that_loads_nothing(story) -> None:
    name, told = story
    page = Page(report_page(told.view()))
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not [value for key, value in page.attributes if key in ("src", "href")]
    assert not any("url(" in text or "@import" in text for text in page.texts)
    assert told.run.run_id in page.texts
    assert name in ("created", "large") or page.tags.count("polyline") >= 5


def test_what_users_wrote_is_escaped(tell) -> None:
    told = tell("running")
    evil = event(schema.Notice(message="<script>alert(1)</script> & more"), time=START + 17)
    write_attempt(told.run, 1, {"supervisor.jsonl": [evil]})
    text = report_page(told.view())
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text


def test_ladder_shows_the_rungs_that_were_used(tell) -> None:
    told = tell("degraded")
    rungs = [
        {"nodes": nodes, "layout": LAYOUT | {"dp": nodes}, "predicted": {"step_seconds": 2.0}}
        for nodes in (6, 5, 4)
    ] + [{"nodes": 3, "layout": None, "predicted": None}]
    told.run.plan_json.write_text(json.dumps({"plans": [], "ladder": rungs}))
    rows = re.findall(
        r"<tr><td>(\d)</td><td>([^<]*)</td><td>([^<]*)</td><td>(\w*)</td></tr>", report_page(told.view())
    )
    assert [(nodes, used) for nodes, _, _, used in rows] == [
        ("6", "used"),
        ("5", ""),
        ("4", "used"),
        ("3", ""),
    ]
    assert rows[-1][1] == "-"


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(st.integers(0, 2**40).map(float), numbers), max_size=30))
def test_any_numbers_make_a_plot_inside_its_box(points) -> None:
    text = line_plot("a <b>", [Series("x", points), Series("y", points[:3])])
    ElementTree.fromstring(text)
    for coordinate in re.findall(r"(-?[\d.]+|nan|inf),(-?[\d.]+|nan|inf)", text):
        x, y = map(float, coordinate)
        assert 0 <= x <= 560 and 0 <= y <= 240


@given(st.lists(st.tuples(st.text(max_size=5), st.floats(-1e6, 1e6)), max_size=10))
def test_any_bars_are_well_formed(bars) -> None:
    printable = [(name if name.isprintable() else "?", value) for name, value in bars]
    ElementTree.fromstring(bar_plot("bars", printable, text=str))
    ElementTree.fromstring(share_bar("shares", printable, text=str))


@given(st.floats(-1e20, 1e20), st.floats(-1e20, 1e20))
def test_ticks_are_few_and_inside(low, high) -> None:
    axis = Axis.of([low, high], 0, 100)
    ticks = axis.ticks()
    assert len(ticks) <= 2 * 5 + 2
    span = axis.high - axis.low
    assert all(axis.low - span * 1e-6 <= tick <= axis.high + span * 1e-6 for tick in ticks)
    assert all(math.isfinite(axis.place(tick)) for tick in ticks)


def test_command(capsys, tell, tmp_path) -> None:
    run = tell("restarted").run
    out = tmp_path / "pages" / "report.html"
    assert run_command(["report", str(run.path), "--out", str(out), "--whole"]) == 0
    assert capsys.readouterr().err == f"wrote {out}\n"
    assert "41 of 60" in out.read_text()
    assert run_command(["report", str(run.path), "--out", str(run.job_json / "x.html")]) == 2


def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("needs a browser: apt-get install chromium")


def drawn(page: Path, folder: Path) -> None:
    """A browser without a network draws a page and has nothing to complain about."""
    picture = folder / f"{page.stem}.png"
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--proxy-server=127.0.0.1:9",  # nobody listens there
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1200,2400",
        f"--screenshot={picture}",
        "--enable-logging=stderr",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert picture.is_file(), done.stderr
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 20_000
    assert "CONSOLE" not in done.stderr, "the page has errors"


def write_trace(run, *, stages: int = 2, micro_batches: int = 3) -> None:
    """A traced step of the run's newest attempt, laid out as planned."""
    attempt = run.attempt(run.attempt_numbers()[-1])
    attempt.trace.mkdir(parents=True)
    for stage in range(stages):
        place = TracePlace(
            rank=stage,
            host="localhost",
            pp=stage,
            dp=0,
            cp=0,
            tp=0,
            stages=stages,
            schedule="1f1b",
            chunks=1,
            micro_batches=micro_batches,
        )
        slots = [slot for slot in timeline("1f1b", stages, 1, micro_batches).slots if slot.stage == stage]
        spans = [
            Span(s.done.work, 7, START + s.start / 10, START + s.stop / 10, s.done.chunk, s.done.micro_batch)
            for s in slots
        ]
        attempt.rank_trace(stage).write_bytes(header_lines(place) + span_lines(place, spans))


def test_the_traced_pipeline_is_drawn(tell) -> None:
    told = tell("restarted")
    assert "<h2>Pipeline</h2>" not in report_page(told.view())
    write_trace(told.run)
    text = report_page(told.view())
    idle = 100 * bubble_ratio("1f1b", 2, 1, 3)
    assert f"Step 7 of attempt 2 as it was: 1f1b, 3 micro-batches, {idle:.1f} % of the stages" in text
    assert text.count("<title>forward of micro-batch") == 2 * 3
    Page(text)


def test_a_browser_draws_it(tell, tmp_path) -> None:
    told, page = tell("degraded"), tmp_path / "report.html"
    write_trace(told.run)
    page.write_text(report_page(told.view()), encoding="utf-8")
    drawn(page, tmp_path)


def test_a_browser_draws_a_plan(capsys, tmp_path) -> None:
    page = tmp_path / "plan.html"
    arguments = ("plan", "llama-70b", "--cluster", "a100-32x8", "--layout", LAYOUTS["interleaved"])
    assert run_command([*arguments, "--html", str(page)]) == 0
    assert f"wrote {page}" in capsys.readouterr().err
    drawn(page, tmp_path)
    assert run_command([*arguments, "--html", str(page / "x")]) == 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_page_holds_what_was_planned(name) -> None:
    spec = resolve("llama-70b", "a100-32x8")
    plan = make_plan(spec, layout=parse_layout(LAYOUTS[name], spec.recipe), top=1)
    text = plan_page(spec, plan, 32)
    page, best = Page(text), plan.plans[0]
    assert not {"script", "link", "img"} & set(page.tags)
    assert len(re.findall(r"<title>rank \d+: ", text)) == best.layout.world_size
    assert len(re.findall(r">stage \d+: \d+ layers?<", text)) == best.layout.pp
    assert bytes_text(best.predicted.memory.total) in text
    if best.layout.pp > 1:
        whole, count = drawable(best.layout, best.accumulation)
        assert count == best.accumulation
        assert whole.bubble_ratio == pytest.approx(best.predicted.bubble_ratio, abs=1e-9)
        assert f"Schedule {best.layout.schedule}: {100 * whole.bubble_ratio:.1f} % of the stages" in text
