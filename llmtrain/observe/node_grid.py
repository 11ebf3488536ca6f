"""Many ranks at a glance: one line a node, one letter a rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from rich.text import Text

from llmtrain.events.records import RankState
from llmtrain.observe.run_reader import RunView
from llmtrain.observe.tables import rank_word
from llmtrain.observe.wording import STYLES

SLOW_RATIO = 1.2
"""A rank whose own computing takes so many times the median is shown as slow."""
LETTERS = {
    "alive": "o",
    "slow": "s",
    "waiting": ".",
    "finished": "+",
    "dead": "x",
    "failed": "x",
    "ended": "-",
    "unknown": "?",
    "lost": "X",
    "idle": "_",
}


def grid_lines(view: RunView, ranks: Sequence[RankState], width: int) -> list[Text]:
    """One cell for every node, as many to a line as fit; then what the letters mean, with their counts."""
    by_host: dict[str, list[str]] = defaultdict(list)
    slow = slow_ranks(ranks)
    for rank in ranks:
        word = rank_word(view, rank)
        by_host[rank.host or "?"].append("slow" if word == "alive" and rank.rank in slow else word)
    for host in _missing_nodes(view):
        by_host[host] = ["lost" if host in view.job.lost_nodes else "idle"]
    name_width = min(24, max(len(host) for host in by_host))
    cell_width = name_width + 1 + max(len(words) for words in by_host.values()) + 3
    per_line = max(1, (width + 3) // cell_width)
    lines: list[Text] = []
    for index, (host, words) in enumerate(by_host.items()):
        if index % per_line == 0:
            lines.append(Text(no_wrap=True, overflow="ellipsis"))
        cell = Text(f"{host[:name_width]:<{name_width}} ", style="dim")
        for word in words:
            cell.append(LETTERS[word], STYLES.get(word, ""))
        cell.pad_right(max(0, cell_width - len(cell)))
        lines[-1].append_text(cell)
    for line in lines:
        line.rstrip()
    return [*lines, _legend([word for words in by_host.values() for word in words])]


def _missing_nodes(view: RunView) -> list[str]:
    """Nodes of the first attempt that the newest one does not use."""
    current = view.state.current
    used = set(current.nodes) if current is not None else set()
    return [host for host in view.state.attempts[0].nodes if host not in used] if view.is_degraded else []


def slow_ranks(ranks: Sequence[RankState]) -> set[int]:
    """Ranks that compute much longer than the median of all."""
    seconds = {rank.rank: rank.compute_seconds for rank in ranks if rank.compute_seconds is not None}
    if len(seconds) < 3:
        return set()
    limit = SLOW_RATIO * median(seconds.values())
    return {rank for rank, own in seconds.items() if own > limit}


def _legend(words: list[str]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for word, letter in LETTERS.items():
        count = words.count(word)
        if count:
            text.append(letter, STYLES.get(word, ""))
            text.append(f" {count} {word}   ", "dim")
    text.rstrip()
    return text
