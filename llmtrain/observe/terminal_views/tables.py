"""The tables of the status view. A row is one line, so that a view knows its height before it is drawn."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from llmtrain.events.records import AttemptState, RankState, RankStatus
from llmtrain.observe.goodput import costs
from llmtrain.observe.members import attempt_word, rank_word
from llmtrain.observe.run_reader import RunView
from llmtrain.observe.wording import STYLES, UNKNOWN, age_text, bytes_text, duration_text


def one_line_table(*, header: bool = True) -> Table:
    """A table without rules around it, as wide as the terminal."""
    return Table(box=None, show_header=header, pad_edge=False, header_style="dim", expand=True)


def add_column(
    table: Table,
    name: str = "",
    *,
    right: bool = False,
    style: str = "",
    width: int | None = None,
    rest: bool = False,
) -> None:
    """Add a column whose cells are cut, never wrapped; `rest` gives it what the others leave (the last
    column)."""
    table.add_column(
        name,
        justify="right" if right else "left",
        style=style,
        width=width,
        ratio=1 if rest else None,
        no_wrap=True,
        overflow="ellipsis",
    )


def labelled_table() -> Table:
    """Two columns: a dim label, and what it labels."""
    table = one_line_table(header=False)
    add_column(table, style="dim", width=10)
    add_column(table, rest=True)
    return table


def ranks_table(view: RunView, ranks: list[RankState], *, wide: bool) -> Table:
    """One line a rank."""
    table = one_line_table()
    names = ["rank", "state", "phase", "step", "seen", "step time", "memory"]
    for name in [*names, *(["compute", "host", "pid", "error"] if wide else ["error"])]:
        add_column(table, name, right=name in ("rank", "step", "step time", "memory"), rest=name == "error")
    for rank in ranks:
        word = rank_word(view, rank)
        has_phase = rank.rank in view.state.ranks and word != RankStatus.FINISHED
        row: list[str | Text] = [
            str(rank.rank),
            Text(word, style=STYLES.get(word, "")),
            rank.phase if has_phase else UNKNOWN,
            str(rank.step or UNKNOWN),
            age_text(view.now - rank.last_seen) if rank.last_seen else UNKNOWN,
            duration_text(rank.step_seconds),
            bytes_text(rank.memory_bytes),
        ]
        if wide:
            row += [duration_text(rank.compute_seconds), rank.host or UNKNOWN, str(rank.pid or UNKNOWN)]
        table.add_row(*row, rank.error.partition("\n")[0])
    return table


def attempts_table(view: RunView, most: int) -> Table:
    """One line for each of the `most` newest attempts: what it did, and what its end cost and why it came."""
    table = one_line_table()
    for name in ("attempt", "outcome", "steps", "lasted", "cost", "why it ended"):
        add_column(table, name, right=name in ("attempt", "lasted", "cost"), rest="why" in name)
    prices = {cost.attempt: cost.total for cost in costs(view)}
    for attempt in view.state.attempts[-most:]:
        table.add_row(*_attempt_row(view, attempt, prices.get(attempt.number)))
    return table


def _attempt_row(view: RunView, attempt: AttemptState, cost: float | None) -> list[str | Text]:
    word = attempt_word(view, attempt)
    steps = f"{attempt.first_step} to {attempt.last_step}" if attempt.first_step is not None else UNKNOWN
    lasted = attempt.seconds
    if not attempt.outcome and attempt.started is not None:
        lasted = view.now - attempt.started if word == "running" else None
    return [
        str(attempt.number),
        Text(word, style=STYLES.get(word, "")),
        steps,
        duration_text(lasted),
        duration_text(cost),
        attempt.cause.partition("\n")[0],
    ]
