"""Traces of steps: lines that survive a kill, and the bubble that they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.events.trace import (
    RankTrace,
    Span,
    TracePlace,
    clock_offsets,
    header_lines,
    measure_bubbles,
    read_trace,
    read_traces,
    span_lines,
)
from llmtrain.plan.timing.schedules import bubble_ratio

PLACE = TracePlace(
    rank=0, host="a", pp=0, dp=0, cp=0, tp=0, stages=4, schedule="1f1b", chunks=1, micro_batches=8
)
START = 1_790_000_000.0


def gpipe(stages: int, micro_batches: int, hosts: list[str], skew: dict[str, float]) -> list[RankTrace]:
    """All forward passes, then all backward ones of twice the length, on clocks that differ by host."""
    traces = []
    for stage in range(stages):
        ahead = START + skew.get(hosts[stage], 0.0)
        back = stages - 1 - stage
        begin = micro_batches + stages - 1
        spans = [
            *(
                Span("forward", 7, ahead + stage + i, ahead + stage + i + 1, stage, i)
                for i in range(micro_batches)
            ),
            *(
                Span(
                    "backward",
                    7,
                    ahead + begin + 2 * (back + i),
                    ahead + begin + 2 * (back + i) + 2,
                    stage,
                    i,
                )
                for i in range(micro_batches)
            ),
            Span("agree", 7, ahead + 99, ahead + 100),
        ]
        traces.append(
            RankTrace(replace(PLACE, rank=stage, pp=stage, host=hosts[stage], stages=stages), tuple(spans))
        )
    return traces


@pytest.mark.parametrize("micro_batches", [1, 4, 32])
def test_the_bubble_is_the_formula_s(micro_batches: int) -> None:
    (bubble,) = measure_bubbles(gpipe(4, micro_batches, ["a"] * 4, {}))
    assert bubble.ratio == pytest.approx(bubble_ratio("1f1b", 4, 1, micro_batches), abs=1e-6)
    assert bubble.seconds == pytest.approx(3 * (micro_batches + 3))
    assert (bubble.column, bubble.step) == ((0, 0, 0), 7)


def test_clocks_of_hosts_are_set_by_the_step_s_collective() -> None:
    traces = gpipe(4, 8, ["a", "a", "b", "c"], {"b": 123.4, "c": -5.0})
    assert clock_offsets(traces, 7) == pytest.approx({"a": 0.0, "b": 123.4, "c": -5.0})
    (bubble,) = measure_bubbles(traces)
    assert bubble.ratio == pytest.approx(bubble_ratio("1f1b", 4, 1, 8), abs=1e-6)


def test_half_a_pipeline_says_nothing() -> None:
    traces = gpipe(4, 8, ["a"] * 4, {})
    assert measure_bubbles(traces[:3]) == []
    silent = replace(traces[3], spans=tuple(span for span in traces[3].spans if span.name == "agree"))
    assert measure_bubbles([*traces[:3], silent]) == []
    other = replace(traces[3], spans=tuple(replace(span, step=8) for span in traces[3].spans))
    assert measure_bubbles([*traces[:3], other]) == []


def test_a_file_is_read_back_and_survives_a_torn_line(tmp_path: Path) -> None:
    (trace,) = gpipe(1, 3, ["a"], {})
    path = tmp_path / "rank-00000.json"
    whole = header_lines(trace.place) + span_lines(trace.place, trace.spans)
    path.write_bytes(whole)
    found = read_trace(path)
    assert found is not None
    assert found.place == trace.place
    assert found.steps == (7,)
    for one, other in zip(found.spans, trace.spans, strict=True):
        assert (one.name, one.stage, one.micro_batch) == (other.name, other.stage, other.micro_batch)
        assert (one.start, one.stop) == pytest.approx((other.start, other.stop), abs=1e-5)
    path.write_bytes(whole + b'{"ph":"X","na')
    assert read_trace(path) == found
    path.write_bytes(whole + b'5,\n{"ph":"X","ts":"x"},\n[1],\n\xff\xfe,\n')
    assert read_trace(path) == found
    assert json.loads(whole.rstrip(b",\n") + b"]")[0]["args"]["name"].startswith("rank 0: pp0 dp0 tp0 on a")


def test_a_file_that_does_not_say_whose_it_is_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.json").write_text("[\n")
    (tmp_path / "rank-00001.json").write_bytes(header_lines(replace(PLACE, rank=1)))
    (tmp_path / "rank-00002.json").write_text('{"name":"llmtrain_place","args":{"rank":3}},\n')
    assert [trace.place.rank for trace in read_traces(tmp_path)] == [1]
    assert read_traces(tmp_path / "none") == []
