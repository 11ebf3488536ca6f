"""Any layout goes on from any other's checkpoint: real ranks, whole optimizer states, bit for bit.

All pairs of all layouts (several hundred) with LLMTRAIN_ALL_PAIRS=1; else those of a few layouts."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.reshard import candidates, load_all, save_all

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

FEW = (1, 2, 3, 9, 13, 14)
"""Worlds of one to eight ranks, each axis once."""
MOST_GROWTH = 64 << 10
"""KiB that a rank may need beyond its own state."""


def test_any_layout_loads_any_other(tmp_path: Path) -> None:
    layouts = list(enumerate(candidates()))
    if os.environ.get("LLMTRAIN_ALL_PAIRS") != "1":
        layouts = [each for each in layouts if each[0] in FEW]
    worlds = defaultdict(list)
    for number, layout in layouts:
        worlds[layout.world_size].append((number, layout))
    saved: dict[int, dict[str, str]] = {}
    for size, members in worlds.items():
        saved |= run_ranks(save_all, size, tmp_path, str(tmp_path), members)[0]
    pairs = 0
    for size, members in worlds.items():
        for ranks in zip(
            *(one.items() for one in run_ranks(load_all, size, tmp_path, str(tmp_path), members, [*saved])),
            strict=True,
        ):
            (source, _), (state, _) = ranks[0]
            assert state == saved[source], ranks[0][0]
            assert max(grown for _, (_, grown) in ranks) < MOST_GROWTH
            pairs += 1
    assert pairs == len(layouts) * (len(layouts) - 1)
    print(f"{pairs} pairs of {len(layouts)} layouts")
