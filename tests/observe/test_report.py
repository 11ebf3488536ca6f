"""The HTML report: well formed, self-contained, escaped, and drawn by a real browser."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.cli.main import run as run_command
from llmtrain.events import schema
from llmtrain.observe.report import report_page
from llmtrain.observe.svg import Axis, Series, bar_plot, line_plot, share_bar
from tests.support.run_folder import LAYOUT, write_attempt
from tests.support.sample_events import START, event

VOID = {"meta", "br"}


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


def test_a_browser_draws_it(tell, tmp_path) -> None:
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(report_page(tell("restarted").view()), encoding="utf-8")
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1200,2400",
        f"--screenshot={picture}",
        "--enable-logging=stderr",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert picture.is_file(), done.stderr
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 20_000
    assert "CONSOLE" not in done.stderr, "the page has errors"
