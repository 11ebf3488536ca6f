"""`llmtrain report`: one run as one HTML page that needs nothing else, not even a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from llmtrain.events.records import StepPoint
from llmtrain.observe.goodput import costs, goodput, lost_steps_of
from llmtrain.observe.html.page import page, table, when
from llmtrain.observe.html.svg import Series, bar_plot, line_plot, share_bar, time_unit
from llmtrain.observe.html.timeline_plot import attempts_plot, traced_plots
from llmtrain.observe.job_facts import read_ladder
from llmtrain.observe.members import node_states
from llmtrain.observe.run_reader import RunView
from llmtrain.observe.wording import (
    SPENT,
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


def report_page(view: RunView) -> str:
    """The whole page."""
    title = f"{view.run.run_id}: {view.status}"
    return page(title, _sections(view))


def _sections(view: RunView) -> Iterator[str]:
    yield f"<h1>{escape(view.run.run_id)}</h1>"
    yield f"<p>{escape(view.status)}: {escape(view.job.recipe)} on {escape(view.job.cluster)}</p>"
    yield table(("", ""), _facts(view), header=False)
    if not view.complete:
        yield "<p>This run has too many events to read them all: curves are samples, sums are estimates.</p>"
    yield f'<h2>Training</h2><div class="plots">{"".join(_training_plots(view))}</div>'
    yield f'<h2>Time</h2><div class="plots">{"".join(_time_plots(view))}</div>'
    yield "<h2>Attempts</h2>" + attempts_plot(view) + _attempts(view)
    if view.state.members:
        yield "<h2>Nodes</h2>" + _nodes(view)
    if pipelines := traced_plots(view):
        yield "<h2>Pipeline</h2>" + pipelines
    yield f'<h2>Ranks</h2><div class="plots">{"".join(_rank_plots(view))}</div>'
    ladder = read_ladder(view.run)
    if ladder:
        yield "<h2>Ladder</h2>" + _ladder(view, ladder)
    moments = [(when(moment.time), moment.level, moment.text) for moment in view.state.moments]
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
    yield "written", when(view.now)


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
    parts = [(SPENT.get(name, name), seconds) for name, seconds in goodput(view).parts()]
    yield share_bar("Where the time went", parts, text=duration_text)
    begin = next((a.started for a in view.state.attempts if a.started is not None), None)
    points = view.state.history.points
    if begin is not None and points:
        name, unit = time_unit(max(point.time for point in points) - begin)
        steps = [((point.time - begin) / unit, float(point.step)) for point in points]
        yield line_plot("Progress", [Series("step", steps)], x_name=f"{name} since the first attempt")


def _rank_plots(view: RunView) -> Iterator[str]:
    ranks = [view.state.ranks[rank] for rank in sorted(view.state.ranks)][:MOST_BARS]
    memory = [(f"rank {r.rank}", float(r.memory_bytes)) for r in ranks if r.memory_bytes is not None]
    own = [(f"rank {r.rank}", r.compute_seconds) for r in ranks if r.compute_seconds is not None]
    yield bar_plot("Peak memory", memory, text=bytes_text)
    yield bar_plot("Computing in the last step, outside collectives", own, text=duration_text)


def _nodes(view: RunView) -> str:
    members = view.state.members
    rows = [
        (
            name,
            str(status),
            when(members[name].since) if name in members else UNKNOWN,
            members[name].reason if name in members else "",
        )
        for name, status in node_states(view).items()
    ]
    return table(("node", "state", "since", "why"), rows)


def _attempts(view: RunView) -> str:
    prices = {cost.attempt: cost.total for cost in costs(view)}
    head = (
        "attempt",
        "started",
        "ranks",
        "layout",
        "steps",
        "lasted",
        "lost steps",
        "cost",
        "outcome",
        "why it ended",
    )
    rows = [
        (
            str(attempt.number),
            when(attempt.started),
            str(attempt.world_size or UNKNOWN),
            layout_text(attempt.layout),
            f"{attempt.first_step} to {attempt.last_step}" if attempt.first_step is not None else UNKNOWN,
            duration_text(attempt.seconds),
            str(lost_steps_of(attempt, view.state.attempts)),
            duration_text(prices.get(attempt.number)),
            attempt.outcome or UNKNOWN,
            attempt.cause or attempt.membership,
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
