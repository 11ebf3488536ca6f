"""What a rank's clock tells of a step, and that a run traces the steps that its recipe names."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from llmtrain.config.layout import Layout
from llmtrain.engine.clock import TraceFile, trace_place
from llmtrain.engine.loop import Loop
from llmtrain.engine.saving import CheckpointFolder
from llmtrain.events.trace import COMPUTE, PHASES, read_trace
from tests.support.engine_cases import Case, build, llama, recipe

pytestmark = pytest.mark.engine


def test_chosen_steps_are_traced(tmp_path: Path) -> None:
    made = recipe(llama(), steps=4)
    made = replace(made, train=replace(made.train, trace_steps=(2, 4)))
    parts = build(Case(made, Layout(micro_batch=2)), 0)
    checkpoints = CheckpointFolder(tmp_path / "checkpoints", "run", parts, writer="attempt 1")
    path = tmp_path / "trace" / "rank-00000.json"
    place = trace_place(parts.groups, parts.layout, parts.batches.micro_batches)
    loop = Loop(
        parts,
        checkpoints,
        lambda payload: None,
        should_stop=lambda: False,
        peak_flops=None,
        trace=TraceFile(path, place),
    )
    loop.run(checkpoints.restore("fresh")[0])
    trace = read_trace(path)
    assert trace is not None
    assert trace.place == place
    assert trace.steps == (2, 4)
    for step in trace.steps:
        passes = list(trace.of_step(step))
        assert [(span.name, span.micro_batch) for span in passes] == [
            (name, index) for index in range(4) for name in ("forward", "backward")
        ]
        phases = list(trace.of_step(step, PHASES))
        assert [span.name for span in phases] == list(PHASES)
        for before, after in pairwise(phases):
            assert after.start == pytest.approx(before.stop, abs=1e-5)
        inside = phases[1]
        for span in trace.of_step(step, [*COMPUTE, "wait"]):
            assert inside.start - 1e-5 <= span.start <= span.stop <= inside.stop + 1e-5


def test_a_full_disk_costs_the_trace_only(tmp_path: Path) -> None:
    made = recipe(llama(), steps=2)
    made = replace(made, train=replace(made.train, trace_steps=(1,)))
    parts = build(Case(made, Layout(micro_batch=2)), 0)
    checkpoints = CheckpointFolder(tmp_path / "checkpoints", "run", parts, writer="attempt 1")
    (tmp_path / "file").write_text("")
    told: list[object] = []
    place = trace_place(parts.groups, parts.layout, parts.batches.micro_batches)
    loop = Loop(
        parts,
        checkpoints,
        told.append,
        should_stop=lambda: False,
        peak_flops=None,
        trace=TraceFile(tmp_path / "file" / "rank-00000.json", place),
    )
    assert loop.run(checkpoints.restore("fresh")[0]) == "completed"
    assert any("step 1 was not traced" in str(event) for event in told)
