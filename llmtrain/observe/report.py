"""`llmtrain report`: one run as one HTML page that needs nothing else, not even a network."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from html import escape

from llmtrain.events.records import StepPoint
from llmtrain.observe.goodput import goodput, lost_steps_of
from llmtrain.observe.job_facts import read_ladder
from llmtrain.observe.run_reader import RunView
from llmtrain.observe.svg import Series, bar_plot, line_plot, share_bar
from llmtrain.observe.wording import (
    UNKNOWN,
    bytes_text,
    count_text,
    duration_text,
    layout_text,
    loss_text,
    percent_text,
    small_text,
)

MOST_BARS = 64
STYLE = """
:root { color-scheme: light dark; --c0: #2f6fb3; --c1: #c2571a; --c2: #2f8f5b;
  --c3: #8a5cb8; --c4: #b3902f; --c5: #a8475f; --c6: #7a7a7a }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(360px, 1fr)); gap: 1rem 2rem }
figure { margin: 0 } figcaption { font-weight: 600 } svg { width: 100%; height: auto }
svg text { font: 11px system-ui, sans-serif; fill: currentColor }
.label { text-anchor: end } .tick { text-anchor: middle }
.grid { stroke: currentColor; opacity: .15 } .line { fill: none; stroke-width: 1.6 }
.c0 { fill: var(--c0) } .c1 { fill: var(--c1) } .c2 { fill: var(--c2) }
.c3 { fill: var(--c3) } .c4 { fill: var(--c4) } .c5 { fill: var(--c5) }
.c6 { fill: var(--c6) }
.s0 { stroke: var(--c0) } .s1 { stroke: var(--c1) } .s2 { stroke: var(--c2) } .s3 { stroke: var(--c3) }
.s4 { stroke: var(--c4) } .s5 { stroke: var(--c5) } .s6 { stroke: var(--c6) }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
.b0 { background: var(--c0) } .b1 { background: var(--c1) } .b2 { background: var(--c2) }
.b3 { background: var(--c3) } .b4 { background: var(--c4) } .b5 { background: var(--c5) }
.b6 { background: var(--c6) }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 1.2rem; padding: 0; margin: .2rem 0 }
table { border-collapse: collapse } .scroll td:nth-child(-n+2) { white-space: nowrap }
th, td { text-align: left; padding: .15rem .9rem .15rem 0; vertical-align: top }
th { opacity: .65; font-weight: 500 } .scroll { overflow-x: auto } .empty { opacity: .6 }
"""


def report_page(view: RunView) -> str:
    """The whole page."""
    title = f"{view.run.run_id}: {view.status}"
    body = "\n".join(_sections(view))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def _sections(view: RunView) -> Iterator[str]:
    yield f"<h1>{escape(view.run.run_id)}</h1>"
    yield f"<p>{escape(view.status)}: {escape(view.job.recipe)} on {escape(view.job.cluster)}</p>"
    yield table(("", ""), _facts(view), header=False)
    if not view.complete:
        yield "<p>This run has too many events to read them all: curves are samples, sums are estimates.</p>"
    yield f'<h2>Training</h2><div class="plots">{"".join(_training_plots(view))}</div>'
    yield f'<h2>Time</h2><div class="plots">{"".join(_time_plots(view))}</div>'
    yield "<h2>Attempts</h2>" + _attempts(view)
    yield f'<h2>Ranks</h2><div class="plots">{"".join(_rank_plots(view))}</div>'
    ladder = read_ladder(view.run)
    if ladder:
        yield "<h2>Ladder</h2>" + _ladder(view, ladder)
    moments = [(_when(moment.time), moment.level, moment.text) for moment in view.state.moments]
    yield "<h2>Events</h2>" + table(("time", "level", "what"), moments)


def _facts(view: RunView) -> Iterator[Sequence[str]]:
    state, latest = view.state, view.state.latest
    yield "steps", f"{state.step} of {state.total_steps or UNKNOWN}"
    yield "loss", loss_text(latest.loss if latest else None)
    if state.evaluations.last:
        yield "validation loss", loss_text(state.evaluations.last.loss)
    yield "layout", layout_text(view.layout)
    yield (
        "speed",
        f"{count_text(state.tokens_per_second)} tokens/s, {duration_text(state.seconds_per_step)} a step",
    )
    if view.job.planned_step_seconds:
        yield "plan", f"{duration_text(view.job.planned_step_seconds)} a step"
    if state.checkpoints:
        last = state.checkpoints[-1]
        yield "checkpoint", f"{last.name}, {bytes_text(last.bytes)}, saved in {duration_text(last.seconds)}"
    yield "goodput", percent_text(goodput(view).ratio)
    if state.ended:
        yield "end", f"exit code {state.ended.exit_status}: {state.ended.message}"
    yield "written", _when(view.now)


def _training_plots(view: RunView) -> Iterator[str]:
    points = view.state.history.points
    validation = [(float(point.step), point.loss) for point in view.state.evaluations.points]
    losses = [Series("training", _over_steps(points, "loss"))]
    yield line_plot("Loss", [*losses, Series("validation", validation)] if validation else losses)
    rates = [Series("learning rate", _over_steps(points, "learning_rate"))]
    yield line_plot("Learning rate", rates, text=small_text)
    yield line_plot("Gradient norm", [Series("gradient norm", _over_steps(points, "grad_norm"))])
    speed = [Series("tokens/s", _over_steps(points, "tokens_per_second"))]
    yield line_plot("Tokens a second", speed, text=count_text)
    if any(point.mfu is not None for point in points):
        used = [(float(point.step), point.mfu) for point in points if point.mfu is not None]
        yield line_plot("Model FLOPs utilisation", [Series("mfu", used)], text=percent_text)


def _over_steps(points: Sequence[StepPoint], name: str) -> list[tuple[float, float]]:
    return [(float(point.step), getattr(point, name)) for point in points]


def _time_plots(view: RunView) -> Iterator[str]:
    yield share_bar("Where the time went", goodput(view).parts(), text=duration_text)
    begin = next((a.started for a in view.state.attempts if a.started is not None), None)
    points = view.state.history.points
    if begin is not None and points:
        name, unit = _time_unit(max(point.time for point in points) - begin)
        steps = [((point.time - begin) / unit, float(point.step)) for point in points]
        yield line_plot("Progress", [Series("step", steps)], x_name=f"{name} since the first attempt")


def _time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which a span reads well, and its seconds."""
    if seconds < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 4 * 3600 else ("hours", 3600.0)


def _rank_plots(view: RunView) -> Iterator[str]:
    ranks = [view.state.ranks[rank] for rank in sorted(view.state.ranks)][:MOST_BARS]
    memory = [(f"rank {r.rank}", float(r.memory_bytes)) for r in ranks if r.memory_bytes is not None]
    own = [(f"rank {r.rank}", r.compute_seconds) for r in ranks if r.compute_seconds is not None]
    yield bar_plot("Peak memory", memory, text=bytes_text)
    yield bar_plot("Computing in the last step, outside collectives", own, text=duration_text)


def _attempts(view: RunView) -> str:
    head = (
        "attempt",
        "started",
        "ranks",
        "layout",
        "steps",
        "lasted",
        "lost steps",
        "started by",
        "outcome",
        "cause",
    )
    rows = [
        (
            str(attempt.number),
            _when(attempt.started),
            str(attempt.world_size or UNKNOWN),
            layout_text(attempt.layout),
            f"{attempt.first_step} to {attempt.last_step}" if attempt.first_step is not None else UNKNOWN,
            duration_text(attempt.seconds),
            str(lost_steps_of(attempt, view.state.attempts)),
            attempt.reason,
            attempt.outcome or UNKNOWN,
            attempt.cause,
        )
        for attempt in view.state.attempts
    ]
    return table(head, rows)


def _ladder(view: RunView, ladder: Sequence[tuple[int, dict[str, object], float | None]]) -> str:
    used = {len(attempt.nodes) for attempt in view.state.attempts}
    rows = [
        (str(nodes), layout_text(layout), duration_text(seconds), "used" if nodes in used else "")
        for nodes, layout, seconds in ladder
    ]
    return table(("nodes left", "layout", "predicted step", ""), rows)


def table(
    head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]], *, header: bool = True
) -> str:
    """An HTML table of texts."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head) if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{f"<tr>{top}</tr>" if header else ""}{body}</table></div>'


def _when(moment: float | None) -> str:
    if moment is None:
        return UNKNOWN
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(moment))
