"""`llmtrain launch --rehearse`: the table of failures made on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.cli import console
from llmtrain.errors import ExitStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.supervise.rehearsal.rehearse import Outcome


def rehearse_and_tell(
    recipe: str, cluster: str, overrides: Sequence[str], names: str, *, as_json: bool
) -> int:
    """Rehearse, print what was measured; 0 only when every scenario that could be rehearsed recovered.

    Of `all`, those that cannot be rehearsed with the profile are left out.
    """
    from dataclasses import asdict

    from llmtrain.supervise.rehearsal.rehearse import EVERYTHING, chosen, rehearse

    outcomes = rehearse(
        recipe, cluster, overrides, chosen(names), console.say, leaves_out=names == EVERYTHING
    )
    done = [outcome for outcome in outcomes if not outcome.skipped]
    if as_json:
        console.emit_json({"scenarios": [asdict(outcome) for outcome in outcomes]})
    else:
        console.emit(_table(outcomes))
    return ExitStatus.DONE if done and all(outcome.recovered for outcome in done) else ExitStatus.FAILED


def _table(outcomes: Sequence[Outcome]) -> str:
    rows = [("scenario", "detected", "recovered", "")]
    for outcome in outcomes:
        word = "not rehearsed" if outcome.skipped else "NOT RECOVERED"
        times = (_seconds(outcome.detect_seconds), _seconds(outcome.recover_seconds))
        rows.append((outcome.name, *(times if outcome.recovered else ("-", word)), outcome.what))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join((*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3])).rstrip()
        for row in rows
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if value >= 1.0 else f"{max(value, 0.001):.3f} s"
