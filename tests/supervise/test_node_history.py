"""What is remembered of nodes and GPUs, and that placement uses convicted ones last."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.backends.base import Node
from llmtrain.run.node_history import DAY, FOLDER, Verdict, recall, remember, suspects
from llmtrain.supervise.nodes.membership import reliable_first

NOW = 1e9


def verdict(node: str, word: str, age: float, gpus: tuple[str, ...] = (), why: str = "why") -> Verdict:
    return Verdict(node=node, time=NOW - age, verdict=word, why=why, gpus=gpus, by="doctor")  # type: ignore[arg-type]


def test_verdicts_survive_and_rubbish_is_skipped(tmp_path: Path) -> None:
    said = [verdict("a", "lost", 50), verdict("we/ird name", "slow", 40, ("GPU-1",)), verdict("a", "fit", 30)]
    remember(tmp_path, said)
    file = tmp_path / FOLDER / "a.jsonl"
    file.write_bytes(file.read_bytes() + b'{"node": "a", "verdict": "new"}\n\xff\xfe\n{"torn')
    assert recall(tmp_path) == tuple(said)
    assert sorted(path.name for path in tmp_path.rglob("*.jsonl")) == ["a.jsonl", "we%2Fird%20name.jsonl"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file")
    remember(tmp_path, [verdict("a", "lost", 0)])
    assert recall(tmp_path) == ()
    assert recall(tmp_path / "nowhere") == ()


@pytest.mark.parametrize(
    ("verdicts", "found"),
    [
        ([], {}),
        ([verdict("a", "lost", 600, why="silent")], {"a": "lost 10 min ago: silent"}),
        ([verdict("a", "lost", 2 * DAY)], {}),
        ([verdict("a", "slow", 6 * DAY, why="link")], {"a": "slow 6 days ago: link"}),
        ([verdict("a", "slow", 8 * DAY)], {}),
        ([verdict("a", "unfit", 7200, why="disk")], {"a": "unfit 2 h ago: disk"}),
        ([verdict("a", "slow", 600), verdict("a", "fit", 300)], {}),
        ([verdict("a", "fit", 600), verdict("a", "slow", 300)], {"a": "slow 5 min ago: why"}),
        ([verdict("elsewhere", "slow", 300)], {}),
        # One GPU: replaced, moved to another node, and cleared.
        ([verdict("a", "slow", 300, ("GPU-a1",))], {"a": "slow 5 min ago: why"}),
        ([verdict("a", "slow", 300, ("GPU-gone",))], {}),
        ([verdict("a", "slow", 300, ("GPU-b1",))], {"b": "slow 5 min ago: why"}),
        ([verdict("a", "slow", 600, ("GPU-a1",)), verdict("a", "fit", 300, ("GPU-a1", "GPU-a2"))], {}),
        ([verdict("a", "slow", 600, ("GPU-a1",)), verdict("a", "fit", 300)], {"a": "slow 10 min ago: why"}),
    ],
)
def test_suspects(verdicts: list[Verdict], found: dict[str, str]) -> None:
    gpus = {"a": ("GPU-a1", "GPU-a2"), "b": ("GPU-b1",), "c": ()}
    assert suspects(verdicts, gpus, NOW) == found


def test_suspects_come_last_and_the_others_keep_their_order() -> None:
    nodes = [Node(name=name, address=name) for name in "abcd"]
    ordered = reliable_first(nodes, {"a": "slow", "c": "lost"})
    assert [node.name for node in ordered] == ["b", "d", "a", "c"]
