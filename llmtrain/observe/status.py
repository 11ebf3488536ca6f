"""The terminal view of one run: from 80 columns on, with or without colour, in as many lines as there are."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmtrain.events.records import RankState
from llmtrain.observe.chart import line_chart, sparkline
from llmtrain.observe.goodput import goodput
from llmtrain.observe.node_grid import grid_lines
from llmtrain.observe.run_reader import RunView
from llmtrain.observe.tables import attempts_table, known_ranks, labelled_table, ranks_table
from llmtrain.observe.wording import (
    STYLES,
    age_text,
    bytes_text,
    count_text,
    duration_text,
    layout_text,
    loss_text,
    percent_text,
    small_text,
)

MOST_RANKS = 32
"""Ranks listed one by one; a bigger world is shown as a grid."""
WIDE = 120
TALL = 20
"""Lines below the facts from which on there is room for charts and stories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Where a view is drawn. `height` None: as many lines as it takes."""

    width: int = 80
    height: int | None = None
    unicode: bool = True


@dataclass(frozen=True, slots=True)
class Section:
    """Something to draw and the lines that it takes."""

    content: RenderableType
    lines: int


def status_screen(view: RunView, screen: Screen) -> Group:
    """Header, facts, loss curve, ranks, attempts and last events; cut to the height, most important first."""
    left = screen.height
    kept: list[Section] = []
    for section in _sections(view, screen):
        if left is not None and section.lines > left:
            continue
        kept.append(section)
        left = None if left is None else left - section.lines
    contents = [section.content for section in kept]
    if not screen.unicode:
        for content in contents:
            _crop(content)
    return Group(*contents)


def _crop(content: RenderableType) -> None:
    """Cut without the ellipsis character, which an ASCII terminal cannot show."""
    if isinstance(content, Text):
        content.overflow = "crop"
    elif isinstance(content, Table):
        for column in content.columns:
            column.overflow = "crop"
    elif isinstance(content, Group):
        for part in content.renderables:
            _crop(part)


def _sections(view: RunView, screen: Screen) -> Iterator[Section]:
    yield Section(_header(view), 1)
    facts = _facts(view, screen)
    yield Section(facts, facts.row_count)
    room = 1000 if screen.height is None else screen.height - 1 - facts.row_count
    if view.state.ended or view.status == "interrupted":
        # It says what to type: wrapped, not cut.
        lines = textwrap.wrap(_ending(view), max(20, screen.width - 12), break_on_hyphens=False)
        end = _with_label("end", lines, STYLES.get(view.status, ""))
        yield end
        room -= end.lines
    chart = _chart(view, screen, room)
    if chart:
        yield _with_label("curve", chart)
        room -= len(chart)
    attempts = attempts_table(view, 6 if room < TALL else 20)
    shown_events = min(len(view.state.moments), 3 if room < TALL else 8)
    reserved = shown_events + (attempts.row_count + 1 if view.state.attempts else 0)
    yield from _members(view, screen, max(4, room - reserved))
    if view.state.attempts:
        yield Section(attempts, attempts.row_count + 1)
    yield from _events(view, shown_events)


def _header(view: RunView) -> Text:
    word = view.status
    text = Text.assemble((view.run.run_id, "bold"), "  ", (word, STYLES.get(word, "")))
    if view.state.attempt > 1:
        text.append(f"  attempt {view.state.attempt}")
    if view.is_degraded and view.state.current:
        text.append(f"  {len(view.state.current.nodes)} of {view.nodes_at_first} nodes", STYLES["warning"])
    if view.job.recipe:
        text.append(f"  {view.job.recipe} on {view.job.cluster}", "dim")
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _facts(view: RunView, screen: Screen) -> Table:
    table = labelled_table()
    for name, value in _fact_rows(view, screen):
        table.add_row(name, value)
    return table


def _chart(view: RunView, screen: Screen, room: int) -> list[str]:
    """The loss over all steps: a line where lines are scarce, else a small chart."""
    losses = [point.loss for point in view.state.history.points]
    width = min(screen.width - 12, 140)
    if len(losses) < 2:
        return []
    if room < TALL:
        return [sparkline(losses, width, unicode=screen.unicode)]
    return line_chart(losses, width, 4 if room < 2 * TALL else 8, unicode=screen.unicode)


def _fact_rows(view: RunView, screen: Screen) -> Iterator[tuple[str, str | Text]]:
    state, latest = view.state, view.state.latest
    yield "step", _progress(view, screen)
    validation = state.evaluations.last
    loss = loss_text(latest.loss if latest else None)
    if validation:
        loss += f"   validation {loss_text(validation.loss)} at step {validation.step}"
    yield "loss", loss
    if latest:
        pace = duration_text(state.seconds_per_step)
        speed = f"{count_text(state.tokens_per_second)} tokens/s   {pace} a step"
        if view.slowdown is not None:
            speed += f" ({view.slowdown:.2g} x the plan's {duration_text(view.job.planned_step_seconds)})"
        yield "speed", speed + (f"   mfu {percent_text(latest.mfu)}" if latest.mfu is not None else "")
        rate, norm = small_text(latest.learning_rate), small_text(latest.grad_norm)
        yield "rates", f"learning rate {rate}   gradient norm {norm}"
    yield "layout", layout_text(view.layout) + _world(view)
    if state.current and state.current.membership:
        yield "rung" if state.current.rung else "members", state.current.membership
    if view.job.lost_nodes:
        yield "lost nodes", ", ".join(view.job.lost_nodes)
    yield "checkpoint", _checkpoint(view)
    split = goodput(view)
    if split.ratio is not None:
        spent = [f"{name} {duration_text(s)}" for name, s in split.parts()[1:] if s >= 0.01 * split.total]
        about = "about " if split.estimated else ""
        yield "goodput", f"{about}{percent_text(split.ratio)}   " + ", ".join(spent)


def _progress(view: RunView, screen: Screen) -> str:
    state = view.state
    if not state.total_steps:
        return f"{state.step}"
    share = min(1.0, state.step / state.total_steps)
    width = 20 if screen.width < WIDE else 40
    full = round(share * width)
    bar = f"[{'=' * full}{' ' * (width - full)}]"
    text = f"{state.step} of {state.total_steps}   {bar} {percent_text(share)}"
    if state.eta_seconds is not None and view.status == "running":
        text += f"   eta {duration_text(state.eta_seconds)}"
    return text


def _world(view: RunView) -> str:
    current = view.state.current
    if current is None or not current.world_size:
        return ""
    where = current.nodes[0] if len(current.nodes) == 1 else f"{len(current.nodes)} nodes"
    return f"   {current.world_size} ranks on {where}"


def _checkpoint(view: RunView) -> str:
    if not view.state.checkpoints:
        return "none yet" if view.state.ended is None else "none"
    last = view.state.checkpoints[-1]
    return (
        f"{last.name}   {age_text(view.now - last.time)}   {bytes_text(last.bytes)}"
        f"   saved in {duration_text(last.seconds)}"
    )


def _ending(view: RunView) -> str:
    ended = view.state.ended
    if ended is not None:
        return f"exit code {ended.exit_status}: {ended.message}"
    return f"nobody supervises this run; go on with: llmtrain resume {view.run.run_id}"


def _members(view: RunView, screen: Screen, room: int) -> Iterator[Section]:
    ranks = known_ranks(view)
    if not ranks:
        return
    hosts = {rank.host for rank in ranks}
    if len(ranks) > MOST_RANKS or (len(hosts) > 1 and (len(ranks) >= room or view.is_degraded)):
        lines = grid_lines(view, ranks, screen.width)
        yield Section(Group(*lines), len(lines))
        return
    shown = ranks if len(ranks) < room else _worst_first(ranks)[: room - 2]
    table = ranks_table(view, shown, wide=screen.width >= WIDE)
    yield Section(table, table.row_count + 1)
    if len(shown) < len(ranks):
        yield Section(Text(f"... and {len(ranks) - len(shown)} more ranks", style="dim"), 1)


def _worst_first(ranks: list[RankState]) -> list[RankState]:
    return sorted(ranks, key=lambda rank: (rank.status not in ("failed", "dead"), rank.last_seen))


def _events(view: RunView, count: int) -> Iterator[Section]:
    for moment in view.state.moments[-count:] if count else ():
        clock = time.strftime("%H:%M:%S", time.localtime(moment.time))
        text = Text(f"{clock}  {moment.text.partition(chr(10))[0]}", style=STYLES.get(moment.level, ""))
        text.no_wrap, text.overflow = True, "ellipsis"
        yield Section(text, 1)


def _with_label(label: str, lines: list[str], style: str = "") -> Section:
    table = labelled_table()
    for index, line in enumerate(lines):
        table.add_row(label if index == 0 else "", Text(line, style, no_wrap=True))
    return Section(table, len(lines))
