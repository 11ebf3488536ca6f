"""Goodput in a line."""

from __future__ import annotations

from llmtrain.observe.goodput import goodput
from llmtrain.observe.run_reader import RunView
from llmtrain.observe.wording import SPENT, duration_text, percent_text


def goodput_text(view: RunView) -> str:
    """`93.1 %   the rest: starting 4.1 s, noticing failures 0.6 s`; empty before the first attempt."""
    split = goodput(view)
    if split.ratio is None:
        return ""
    spent = [
        f"{SPENT.get(name, name)} {duration_text(seconds)}"
        for name, seconds in split.parts()[1:]
        if seconds >= 0.01 * split.total
    ]
    about = "about " if split.estimated else ""
    rest = f"   the rest: {', '.join(spent)}" if spent else ""
    return f"{about}{percent_text(split.ratio)}{rest}"
