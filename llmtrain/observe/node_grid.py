"""Many ranks at a glance: one line a node, one letter a rank."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from rich.text import Text

from llmtrain.events.records import RankState
from llmtrain.observe.run_reader import RunView
from llmtrain.observe.wording import STYLES

SLOW_RATIO = 1.2
"""A rank whose own computing takes so many times the median is shown as slow."""
LEGEND = {
    "o": ("alive", "alive"),
    "s": ("slow", "warning"),
    ".": ("starting", "starting"),
    "+": ("finished", "finished"),
    "x": ("dead or failed", "dead"),
    "-": ("ended", ""),
}


def grid_lines(view: RunView, width: int) -> list[Text]:
    """One line for every node (as many to a line as fit), then what the letters mean with their counts."""
    letters = {rank: rank_letter(view, state) for rank, state in view.state.ranks.items()}
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(letters):
        by_host[view.state.ranks[rank].host or "?"].append(rank)
    name_width = min(24, max(len(host) for host in by_host))
    cell_width = name_width + 1 + max(len(ranks) for ranks in by_host.values()) + 3
    per_line = max(1, width // cell_width)
    lines: list[Text] = []
    for index, (host, ranks) in enumerate(by_host.items()):
        if index % per_line == 0:
            lines.append(Text(no_wrap=True, overflow="ellipsis"))
        cell = Text(f"{host[:name_width]:<{name_width}} ", style="dim")
        for rank in ranks:
            cell.append(letters[rank], STYLES.get(LEGEND[letters[rank]][1], ""))
        cell.pad_right(max(0, cell_width - len(cell)))
        lines[-1].append_text(cell)
    return [*lines, _legend(list(letters.values()))]


def rank_letter(view: RunView, rank: RankState) -> str:
    """The letter of one rank."""
    if rank.status in ("failed", "dead"):
        return "x"
    if rank.status == "finished":
        return "+"
    if not view.state.is_alive(rank.rank):
        return "-"
    if rank.status == "starting":
        return "."
    return "s" if is_slow(view, rank) else "o"


def is_slow(view: RunView, rank: RankState) -> bool:
    """Whether a rank computes much longer than the median of all."""
    known = [r.compute_seconds for r in view.state.ranks.values() if r.compute_seconds is not None]
    return (
        rank.compute_seconds is not None
        and len(known) > 2
        and rank.compute_seconds > SLOW_RATIO * median(known)
    )


def _legend(letters: list[str]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for letter, (word, style) in LEGEND.items():
        count = letters.count(letter)
        if count:
            text.append(letter, STYLES.get(style, ""))
            text.append(f" {count} {word}   ", "dim")
    return text
