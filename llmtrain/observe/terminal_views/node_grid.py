"""Many ranks at a glance: a cell a node with a letter a rank, and a line for every node that is not well."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.text import Text

from llmtrain.events.records import RankState
from llmtrain.events.words import NodeStatus
from llmtrain.observe.members import node_of, node_states, rank_scores, rank_word, slow_ranks
from llmtrain.observe.run_reader import RunView
from llmtrain.observe.wording import STYLES, age_text, clock_text

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
    "quarantined": "Q",
    "spare": "_",
}
AWAY = (NodeStatus.LOST, NodeStatus.QUARANTINED, NodeStatus.SPARE)
"""States of nodes that have no ranks."""
MOST_TOLD = 6
"""Nodes that get a line of their own."""


def grid_lines(view: RunView, ranks: Sequence[RankState], width: int) -> list[Text]:
    """One cell for every node, as many to a line as fit; then what the letters mean, with their counts."""
    by_node: dict[str, list[str]] = defaultdict(list)
    slow = slow_ranks(ranks)
    for rank in ranks:
        word = rank_word(view, rank)
        name = node_of(view, rank) or "?"
        by_node[name].append("slow" if word == "alive" and rank.rank in slow else word)
    for name, status in node_states(view).items():
        if name not in by_node and status in AWAY:
            by_node[name] = [str(status)]
    name_width = min(24, max(len(name) for name in by_node))
    cell_width = name_width + 1 + max(len(words) for words in by_node.values()) + 3
    per_line = max(1, (width + 3) // cell_width)
    lines: list[Text] = []
    for index, (name, words) in enumerate(by_node.items()):
        if index % per_line == 0:
            lines.append(Text(no_wrap=True, overflow="ellipsis"))
        cell = Text(f"{name[:name_width]:<{name_width}} ", style="dim")
        for word in words:
            cell.append(LETTERS[word], STYLES.get(word, ""))
        cell.pad_right(max(0, cell_width - len(cell)))
        lines[-1].append_text(cell)
    for line in lines:
        line.rstrip()
    legend = _legend([word for words in by_node.values() for word in words])
    return [*lines, legend, *told_nodes(view)]


def told_nodes(view: RunView) -> list[Text]:
    """A line for every node that is slow, in quarantine or lost: since when or until when, and why."""
    lines = []
    for name, status in node_states(view).items():
        if status in (NodeStatus.HEALTHY, NodeStatus.SPARE):
            continue
        text = Text.assemble((name, "dim"), "  ", (str(status), STYLES.get(status, "")))
        text.no_wrap, text.overflow = True, "ellipsis"
        text.append(_why(view, name, status))
        lines.append(text)
    hidden = len(lines) - MOST_TOLD
    return [*lines[:MOST_TOLD], *([Text(f"... and {hidden} more nodes", style="dim")] if hidden > 0 else [])]


def _why(view: RunView, name: str, status: NodeStatus) -> str:
    member = view.state.members.get(name)
    if member is None or member.status != status:
        return _slow_ranks_of(view, name) if status == NodeStatus.SLOW else ""
    when = f" {age_text(view.now - member.since)}"
    if member.until is not None and member.until > view.now:
        when = f" until {clock_text(member.until)}"
    reason = member.reason.partition("\n")[0]
    return when + (f": {reason}" if reason else "")


def _slow_ranks_of(view: RunView, name: str) -> str:
    """The slowest rank of a node, against all."""
    ranks = list(view.state.ranks.values())
    scores = {
        rank: score
        for rank, score in rank_scores(ranks).items()
        if node_of(view, view.state.ranks[rank]) == name
    }
    rank = min(scores, key=lambda each: scores[each])
    return f": rank {rank} computes {1 / scores[rank]:.2g} times as long as most"


def _legend(words: list[str]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for word, letter in LETTERS.items():
        count = words.count(word)
        if count:
            text.append(letter, STYLES.get(word, ""))
            text.append(f" {count} {word}   ", "dim")
    text.rstrip()
    return text
