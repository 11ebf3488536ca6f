"""The tables of the status view. A row is one line, so that a view knows its height before it is drawn."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from llmtrain.events.records import AttemptState, RankState
from llmtrain.observe.goodput import lost_steps_of
from llmtrain.observe.run_reader import RunView
from llmtrain.observe.wording import STYLES, UNKNOWN, age_text, bytes_text, duration_text


def one_line_table(*, header: bool = True) -> Table:
    """A table without rules around it."""
    return Table(box=None, show_header=header, pad_edge=False, header_style="dim")


def add_column(
    table: Table, name: str = "", *, right: bool = False, style: str = "", width: int | None = None
) -> None:
    """Add a column whose cells are cut, never wrapped."""
    table.add_column(
        name,
        justify="right" if right else "left",
        style=style,
        width=width,
        no_wrap=True,
        overflow="ellipsis",
    )


def labelled_table() -> Table:
    """Two columns: a dim label, and what it labels."""
    table = one_line_table(header=False)
    add_column(table, style="dim", width=10)
    add_column(table)
    return table


def ranks_table(view: RunView, ranks: list[RankState], *, wide: bool) -> Table:
    """One line a rank."""
    table = one_line_table()
    names = ["rank", "state", "phase", "step", "seen", "step time", "memory"]
    for name in [*names, *(["compute", "host", "pid", "error"] if wide else ["error"])]:
        add_column(table, name, right=name in ("rank", "step", "step time", "memory"))
    for rank in ranks:
        word = _rank_word(view, rank)
        row: list[str | Text] = [
            str(rank.rank),
            Text(word, style=STYLES.get(word, "")),
            rank.phase,
            str(rank.step or UNKNOWN),
            age_text(view.now - rank.last_seen) if rank.last_seen else UNKNOWN,
            duration_text(rank.step_seconds),
            bytes_text(rank.memory_bytes),
        ]
        if wide:
            row += [duration_text(rank.compute_seconds), rank.host or UNKNOWN, str(rank.pid or UNKNOWN)]
        table.add_row(*row, rank.error.partition("\n")[0])
    return table


def _rank_word(view: RunView, rank: RankState) -> str:
    if view.state.is_alive(rank.rank):
        return "alive" if view.is_supervised else "unknown"
    return "ended" if rank.status in ("starting", "running") else str(rank.status)


def attempts_table(view: RunView, most: int) -> Table:
    """One line for each of the `most` newest attempts."""
    table = one_line_table()
    for name in ("attempt", "outcome", "steps", "lasted", "lost", "started by -> ended by"):
        add_column(table, name, right=name in ("attempt", "lasted", "lost"))
    for attempt in view.state.attempts[-most:]:
        table.add_row(*_attempt_row(view, attempt))
    return table


def _attempt_row(view: RunView, attempt: AttemptState) -> list[str | Text]:
    goes_on = attempt is view.state.current and view.state.ended is None and view.is_supervised
    word = attempt.outcome or ("running" if goes_on else "abandoned")
    steps = f"{attempt.first_step} to {attempt.last_step}" if attempt.first_step is not None else UNKNOWN
    lasted = attempt.seconds
    if not attempt.outcome and attempt.started is not None:
        lasted = view.now - attempt.started if goes_on else None
    lost = lost_steps_of(attempt, view.state.attempts)
    return [
        str(attempt.number),
        Text(word, style=STYLES.get(word, "")),
        steps,
        duration_text(lasted),
        f"{lost} steps" if lost else UNKNOWN,
        " -> ".join(part for part in (attempt.reason, attempt.cause) if part),
    ]
