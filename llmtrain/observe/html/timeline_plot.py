"""Who did what when, as bars over time: a pipeline's step as planned or as traced, and a run's attempts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from llmtrain.events.trace import Bubble, RankTrace, clock_offsets, measure_bubbles, read_traces
from llmtrain.observe.html.svg import Axis, drawing, figure, legend, time_unit
from llmtrain.observe.members import attempt_word
from llmtrain.observe.run_reader import RunView
from llmtrain.observe.wording import duration_text
from llmtrain.plan.timing.timeline import Timeline
from llmtrain.units import percent

WIDTH, LEFT, RIGHT, TOP, BOTTOM, ROW = 1120, 96, 12, 6, 34, 24
NUMBERED_WIDTH = 13.0
"""Pixels from which on a bar holds its number."""
MOST_BARS = 8000
"""Bars of one drawing; more would only make a big file."""
KINDS = {"forward": "c0", "loss": "c4", "backward": "c1", "weight": "c2"}
OUTCOMES = {"completed": "c2", "stopped": "c4", "failed": "c5", "running": "c0", "abandoned": "c6"}


@dataclass(frozen=True, slots=True)
class Bar:
    """One stretch of time in one row."""

    row: int
    start: float
    stop: float
    colour: str
    """Class of the style sheet."""
    title: str
    """Shown when the mouse rests on it."""
    number: str = ""


def bars_plot(
    title: str, rows: Sequence[str], bars: Sequence[Bar], *, x_name: str, meaning: Iterable[tuple[str, str]]
) -> str:
    """Rows of bars over a common time, and what the colours mean: (class, word)."""
    if not bars:
        return figure(title, '<p class="empty">no data</p>')
    across = Axis.of([0.0, max(bar.stop for bar in bars)], LEFT, WIDTH - RIGHT)
    height = TOP + ROW * len(rows) + BOTTOM
    parts = [
        f'<text class="label" x="{LEFT - 8}" y="{TOP + ROW * index + 15}">{escape(name)}</text>'
        for index, name in enumerate(rows)
    ]
    parts += [_bar(bar, across) for bar in bars[:MOST_BARS]]
    for tick in across.ticks():
        x, y = across.place(tick), TOP + ROW * len(rows)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y + 14}">{tick:.6g}</text>')
    parts.append(f'<text class="tick" x="{(LEFT + WIDTH) / 2}" y="{height - 3}">{escape(x_name)}</text>')
    meanings = legend((int(colour.removeprefix("c")), word) for colour, word in meaning)
    return figure(title, drawing(title, parts, height, width=WIDTH) + meanings)


def _bar(bar: Bar, across: Axis) -> str:
    x, width = across.place(bar.start), across.place(bar.stop) - across.place(bar.start)
    y = TOP + ROW * bar.row
    shape = (
        f'<rect class="{bar.colour}" x="{x:.2f}" y="{y + 1}" width="{max(0.4, width - 0.5):.2f}" '
        f'height="{ROW - 3}"><title>{escape(bar.title)}</title></rect>'
    )
    if not bar.number or width < NUMBERED_WIDTH:
        return shape
    return f'{shape}<text class="on" x="{x + width / 2:.1f}" y="{y + 16}">{escape(bar.number)}</text>'


def planned_plot(title: str, drawn: Timeline, chunks: int) -> str:
    """A schedule as planned; time in forward passes of a whole stage."""
    bars = [
        Bar(
            slot.stage,
            slot.start,
            slot.stop,
            KINDS[slot.done.work] + (" soft" if slot.done.chunk // drawn.stages % 2 else ""),
            f"{slot.done.work} of micro-batch {slot.done.micro_batch}"
            + (f", chunk {slot.done.chunk}" if chunks > 1 else ""),
            str(slot.done.micro_batch),
        )
        for slot in drawn.slots
    ]
    rows = [f"stage {stage}" for stage in range(drawn.stages)]
    kinds = {slot.done.work for slot in drawn.slots}
    meaning = [(colour, kind) for kind, colour in KINDS.items() if kind in kinds]
    return bars_plot(title, rows, bars, x_name="forward passes of a stage", meaning=meaning)


def traced_plots(view: RunView) -> str:
    """The newest traced step of the newest attempt that has one: the first pipeline, and the bubble measured
    in all; empty without a trace."""
    for attempt in reversed(view.state.attempts):
        try:
            traces = read_traces(view.run.attempt(attempt.number).trace)
        except OSError:
            continue
        bubbles = measure_bubbles(traces)
        if bubbles:
            return _traced(traces, bubbles, attempt.number)
    return ""


def _traced(traces: Sequence[RankTrace], bubbles: Sequence[Bubble], attempt: int) -> str:
    step = max(bubble.step for bubble in bubbles)
    shown = next(bubble for bubble in bubbles if bubble.step == step)
    members = [trace for trace in traces if trace.place.column == shown.column]
    offsets = clock_offsets(members, step)
    begin = min(s.start - offsets.get(m.place.host, 0.0) for m in members for s in m.of_step(step))
    bars = [
        Bar(
            trace.place.pp,
            span.start - offsets.get(trace.place.host, 0.0) - begin,
            span.stop - offsets.get(trace.place.host, 0.0) - begin,
            KINDS[span.name],
            f"{span.name} of micro-batch {span.micro_batch}: {duration_text(span.stop - span.start)}",
            str(span.micro_batch) if span.micro_batch >= 0 else "",
        )
        for trace in members
        for span in trace.of_step(step)
    ]
    place = members[0].place
    title = (
        f"Step {step} of attempt {attempt} as it was: {place.schedule}, {place.micro_batches} micro-batches, "
        f"{percent(shown.ratio)} of the stages' time idle"
    )
    if len(bubbles) > 1:
        middle = median(bubble.ratio for bubble in bubbles)
        title += f" (median of {len(bubbles)} traced pipelines and steps: {percent(middle)})"
    kinds = {span.name for trace in members for span in trace.of_step(step)}
    meaning = [(colour, kind) for kind, colour in KINDS.items() if kind in kinds]
    rows = [f"stage {stage}" for stage in range(place.stages)]
    return bars_plot(title, rows, bars, x_name="seconds", meaning=meaning)


def attempts_plot(view: RunView) -> str:
    """All attempts over the time since the first one; what lies between them is time without ranks."""
    attempts = [attempt for attempt in view.state.attempts if attempt.started is not None]
    if not attempts:
        return ""
    begin = attempts[0].started or 0.0
    now = view.now if view.is_supervised else (view.state.last_event or begin)
    ends = [attempt.started for attempt in attempts[1:]]
    name, unit = time_unit((view.state.last_event or now) - begin)
    bars = []
    for attempt, later in zip(attempts, [*ends, None], strict=True):
        word = attempt_word(view, attempt)
        stop = attempt.ended or (later if later is not None else now)
        title = f"attempt {attempt.number}: {word}" + (f", {attempt.cause}" if attempt.cause else "")
        start = ((attempt.started or begin) - begin) / unit
        end = max(start, ((stop or now) - begin) / unit)
        colour = OUTCOMES.get(word, "c6")
        bars.append(Bar(0, start, end, colour, title, str(attempt.number)))
    words = {attempt_word(view, attempt) for attempt in attempts}
    meaning = [(colour, word) for word, colour in OUTCOMES.items() if word in words]
    return bars_plot("Over time", ["attempts"], bars, x_name=f"{name} since the first one", meaning=meaning)
