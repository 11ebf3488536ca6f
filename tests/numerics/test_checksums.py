"""Who is convicted of corrupt weights."""

from __future__ import annotations

import pytest

from llmtrain.engine.numerics.checksums import Checksums, Suspicion, convict


def sharded(held: list[list[int]], truths: list[int], *, independent: bool = True) -> list[Checksums]:
    """Replica i owns region i."""
    return [
        Checksums(held=tuple(row), owned={index: truths[index]}, independent=independent)
        for index, row in enumerate(held)
    ]


def whole(held: list[list[int]], truths: list[list[int]]) -> list[Checksums]:
    """Every replica owns all regions."""
    return [
        Checksums(held=tuple(row), owned=dict(enumerate(owned)))
        for row, owned in zip(held, truths, strict=True)
    ]


CASES = {
    "all-well": (sharded([[1, 2], [1, 2]], [1, 2]), []),
    "two-replicas-other": (sharded([[1, 9], [1, 2]], [1, 2]), [(1, (0,), "weights")]),
    "two-replicas-owner": (sharded([[9, 2], [1, 2]], [1, 2]), [(0, (0,), "weights")]),
    "master": (sharded([[1, 2], [1, 2]], [9, 2]), [(0, (0,), "master")]),
    "three-replicas": (sharded([[1, 2, 3], [1, 2, 8], [1, 2, 3]], [1, 2, 3]), [(2, (1,), "weights")]),
    "two-regions": (sharded([[7, 2], [1, 8]], [1, 2]), [(0, (0,), "weights"), (1, (1,), "weights")]),
    "fp32-two": (sharded([[9, 2], [1, 2]], [9, 2], independent=False), [(0, (0, 1), "unknown")]),
    "fp32-three": (
        sharded([[9, 2, 3], [1, 2, 3], [1, 2, 3]], [9, 2, 3], independent=False),
        [(0, (0,), "master")],
    ),
    "zero0-weights": (whole([[1, 9], [1, 2]], [[1, 2], [1, 2]]), [(1, (0,), "weights")]),
    "zero0-both-two": (whole([[1, 9], [1, 2]], [[1, 9], [1, 2]]), [(1, (0, 1), "unknown")]),
    "zero0-both-three": (
        whole([[1, 9], [1, 2], [1, 2]], [[1, 9], [1, 2], [1, 2]]),
        [(1, (0,), "master")],
    ),
    "alone": (whole([[9]], [[1]]), [(0, (0,), "weights")]),
}


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name: str) -> None:
    replicas, expected = CASES[name]
    found = convict(replicas)
    assert found == tuple(Suspicion(region=r, members=m, part=p) for r, m, p in expected)
