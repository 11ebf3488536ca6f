"""The terminal view of one run: from 80 columns on, with or without colour, in as many lines as there are."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmtrain.events.records import RankStatus, RunStatus, SaveInterval
from llmtrain.events.saving import interval_text, source_text
from llmtrain.events.words import NodeStatus
from llmtrain.observe.goodput_text import goodput_text
from llmtrain.observe.members import known_ranks, node_counts, node_states
from llmtrain.observe.reactions import reactions_text
from llmtrain.observe.run_reader import RunView
from llmtrain.observe.terminal_views.chart import line_chart, sparkline
from llmtrain.observe.terminal_views.node_grid import grid_lines
from llmtrain.observe.terminal_views.tables import attempts_table, labelled_table, ranks_table
from llmtrain.observe.wording import (
    STYLES,
    age_text,
    bytes_text,
    clock_text,
    comparison_text,
    count_text,
    duration_text,
    layout_text,
    loss_text,
    percent_text,
    small_text,
)
from llmtrain.units import plural

MOST_RANKS = 32
"""Ranks listed one by one; a bigger world is shown as a grid."""
SHORT = 30
"""A terminal of fewer lines has room for few stories."""
LABEL_WIDTH = 12
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
    left = screen.height or 1000
    kept: list[Section] = []
    for section in _sections(view, screen):
        if section.lines <= left:
            kept.append(section)
            left -= section.lines
    kept += _events(view, min(left, _most_events(screen)))
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
    room = 1000 if screen.height is None else screen.height - 1
    for fact in _facts(view, screen):
        yield fact
        room -= fact.lines
    if view.state.ended or view.status is RunStatus.INTERRUPTED:
        # It says what to type: wrapped, not cut.
        end = _with_label("end", _wrapped(_ending(view), screen), STYLES.get(view.status, ""))
        yield end
        room -= end.lines
    chart = _chart(view, screen, room)
    if chart:
        yield _with_label("curve", chart)
        room -= len(chart)
    attempts = attempts_table(view, 3 if room < TALL else 20)
    shown_events = min(len(view.state.moments), _most_events(screen))
    reserved = shown_events + (attempts.row_count + 1 if view.state.attempts else 0)
    yield from _members(view, screen, max(4, room - reserved))
    if view.state.attempts:
        yield Section(attempts, attempts.row_count + 1)


def _most_events(screen: Screen) -> int:
    return 5 if screen.height is not None and screen.height < SHORT else 10


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


def _facts(view: RunView, screen: Screen) -> Iterator[Section]:
    """A fact that is too long for its line goes on in the next ones; nothing of it is cut."""
    for name, value in _fact_rows(view, screen):
        yield _with_label(name, _wrapped(value, screen))


def _wrapped(text: str, screen: Screen) -> list[str]:
    width = max(20, screen.width - LABEL_WIDTH)
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _chart(view: RunView, screen: Screen, room: int) -> list[str]:
    """The loss over all steps: a line where lines are scarce, else a small chart."""
    losses = [point.loss for point in view.state.history.points]
    width = min(screen.width - 12, 140)
    if len(losses) < 2:
        return []
    if room < TALL:
        return [sparkline(losses, width, unicode=screen.unicode)]
    return line_chart(losses, width, 4 if room < 2 * TALL else 8, unicode=screen.unicode)


def _fact_rows(view: RunView, screen: Screen) -> Iterator[tuple[str, str]]:
    state, latest = view.state, view.state.latest
    yield "step", _progress(view, screen)
    validation = state.evaluations.last
    loss = loss_text(latest.loss if latest else None)
    if validation:
        loss += f"   validation {loss_text(validation.loss)} at step {validation.step}"
    yield "loss", loss
    if latest:
        rate, norm = small_text(latest.learning_rate), small_text(latest.grad_norm)
        yield "rates", f"learning rate {rate}   gradient norm {norm}"
        yield "speed", _speed(view)
    if memory := _memory(view):
        yield "memory", memory
    layout, where = layout_text(view.layout), _nodes(view)
    if len(f"{layout}   {where}") + LABEL_WIDTH <= screen.width:
        yield "layout", f"{layout}   {where}".rstrip()
    else:
        yield "layout", layout
        yield "nodes", where
    if state.current and state.current.membership:
        yield "members", state.current.membership
    yield "checkpoint", _checkpoint(view)
    if state.save_interval:
        yield "saves", _interval(state.save_interval)
    numbers = reactions_text(view.state.reactions)
    if numbers:
        yield "numbers", numbers
    if split := goodput_text(view):
        yield "goodput", split


def _speed(view: RunView) -> str:
    state, planned = view.state, view.job.planned_step_seconds
    text = f"{count_text(state.tokens_per_second)} tokens/s   {duration_text(state.seconds_per_step)} a step"
    if view.slowdown is not None and planned:
        text += f", {comparison_text(view.slowdown, 1.0)}"
    latest = state.latest
    return text + (f"   MFU {percent_text(latest.mfu)}" if latest and latest.mfu is not None else "")


def _memory(view: RunView) -> str:
    """Of the fullest rank, against the plan and the device; empty when no rank has told."""
    used = [rank.memory_bytes for rank in view.state.ranks.values() if rank.memory_bytes]
    if not used:
        return ""
    planned, capacity = view.job.planned_memory_bytes, view.job.memory_capacity_bytes
    text = f"{bytes_text(max(used))} on the fullest rank"
    if planned and dict(view.layout) == dict(view.job.layout):
        text += f", {comparison_text(max(used), planned)}"
    return text + (f"   of {bytes_text(capacity)}" if capacity and max(used) <= capacity else "")


def _progress(view: RunView, screen: Screen) -> str:
    state = view.state
    if not state.total_steps:
        return f"{state.step}"
    share = min(1.0, state.step / state.total_steps)
    width = 20 if screen.width < WIDE else 40
    full = round(share * width)
    bar = f"[{'=' * full}{' ' * (width - full)}]"
    text = f"{state.step} of {state.total_steps}   {bar} {percent_text(share)}"
    if state.eta_seconds and view.status is RunStatus.RUNNING:  # After the last step the rest has no pace.
        text += f"   eta {duration_text(state.eta_seconds)}"
    return text


def _nodes(view: RunView) -> str:
    """Where the ranks are, and what the other nodes are."""
    current = view.state.current
    if current is None or not current.world_size:
        return ""
    where = current.nodes[0] if len(current.nodes) == 1 else f"{len(current.nodes)} nodes"
    text = f"{plural(current.world_size, 'rank')} on {where}"
    counts = node_counts(view)
    if sum(counts.values()) > 1:
        text += "   " + ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return text


def _checkpoint(view: RunView) -> str:
    if not view.state.checkpoints:
        return "none yet" if view.state.ended is None else "none"
    last = view.state.checkpoints[-1]
    return (
        f"{last.name}   {age_text(view.now - last.time)}   {bytes_text(last.bytes)}"
        f"   saved in {duration_text(last.seconds)}"
    )


def _interval(interval: SaveInterval) -> str:
    why = source_text(interval.source, interval.stall_seconds, interval.between_failures)
    return interval_text(interval.every_steps, interval.seconds) + (f"   {why}" if why else "")


def _ending(view: RunView) -> str:
    ended = view.state.ended
    if ended is not None:
        return f"exit code {ended.exit_status}: {ended.message}"
    return f"nobody supervises this run; go on with: llmtrain resume {view.run.run_id}"


def _members(view: RunView, screen: Screen, room: int) -> Iterator[Section]:
    """A line a rank where there is room for all and it tells something; else the grid, and a line for each
    of the ranks that ended by themselves."""
    ranks = known_ranks(view)
    if not ranks:
        return
    is_well = all(status == NodeStatus.HEALTHY for status in node_states(view).values())
    shown = ranks
    if len(ranks) > MOST_RANKS or len(ranks) >= room or not is_well:
        lines = grid_lines(view, ranks, screen.width)
        yield Section(Group(*lines), len(lines))
        ended = [rank for rank in ranks if rank.status in (RankStatus.FAILED, RankStatus.DEAD)]
        shown = ended[: min(MOST_RANKS, max(0, room - len(lines) - 1))]
        if not shown:
            return
    table = ranks_table(view, shown, wide=screen.width >= WIDE)
    yield Section(table, table.row_count + 1)


def _events(view: RunView, count: int) -> Iterator[Section]:
    for moment in view.state.moments[-count:] if count else ():
        text = Text(
            f"{clock_text(moment.time)}  {moment.text.partition(chr(10))[0]}",
            style=STYLES.get(moment.level, ""),
        )
        text.no_wrap, text.overflow = True, "ellipsis"
        yield Section(text, 1)


def _with_label(label: str, lines: list[str], style: str = "") -> Section:
    table = labelled_table()
    for index, line in enumerate(lines):
        table.add_row(label if index == 0 else "", Text(line, style, no_wrap=True))
    return Section(table, len(lines))
