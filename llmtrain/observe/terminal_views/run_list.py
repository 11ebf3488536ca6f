"""All runs of a folder at a glance."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from llmtrain.observe.run_reader import RunView
from llmtrain.observe.terminal_views.tables import add_column, one_line_table
from llmtrain.observe.wording import STYLES, UNKNOWN, age_text, loss_text


def runs_table(views: Sequence[RunView]) -> Table:
    """One line a run."""
    table = one_line_table()
    for name in ("run", "state", "step", "loss", "restarts", "last event", "recipe on cluster"):
        add_column(table, name, right=name in ("step", "loss", "restarts"), rest="on" in name.split())
    for view in views:
        state, word = view.state, view.status
        latest = state.latest
        table.add_row(
            view.run.run_id,
            Text(word, style=STYLES.get(word, "")),
            f"{state.step}/{state.total_steps or UNKNOWN}",
            loss_text(latest.loss if latest else None),
            str(state.restarts),
            age_text(view.now - state.last_event) if state.last_event is not None else UNKNOWN,
            f"{view.job.recipe} on {view.job.cluster}",
        )
    return table
