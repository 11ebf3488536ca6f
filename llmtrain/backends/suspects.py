"""Which nodes and links are slow, from measurements of pairs, and who is paired with whom. Pure.

A slow link makes every pair of its node slow, so a node is as fast as its best pair: a node whose best pair
is far below those of the others is convicted, and not the partners that it drags down. A pair that is far
below what both its nodes reach with others is a bad link between two good nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

SLOW_NODE: Mapping[str, float] = {"cuda": 0.6, "cpu": 0.4}
"""Share of the median node's bandwidth below which a node is slow; half of a bonded link is 0.5."""
SLOW_PAIR: Mapping[str, float] = {"cuda": 0.4, "cpu": 0.2}
"""Share of what both nodes reach elsewhere below which one pair is slow: others may share its way."""
SLOW_PRODUCT: Mapping[str, float] = {"cuda": 0.85, "cpu": 0.4}
"""Share of the median rate below which a GPU or a core is slow; cores, and what gloo sends by them, are
shared with other work."""

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What was measured; rates in FLOP/s and bytes/s, 0 for what failed."""

    device: str
    """`cpu` or `cuda`."""
    products: Mapping[str, Sequence[float]]
    """Node -> rate of each GPU, or of one core."""
    pairs: Mapping[Pair, float]
    """Pair -> bandwidth of an all-reduce between the two."""
    errors: Mapping[Pair, str]
    """Pair -> why it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """One node that is slow, or the link between two."""

    nodes: tuple[str, ...]
    """One node, or both ends of a link."""
    why: str
    gpu: int | None = None
    """Which GPU, where it is one of several."""


def rounds(names: Sequence[str], most: int) -> list[list[Pair]]:
    """Pairings in which each node meets another one in every round (all but one, of an odd number).

    The circle method of round-robin tournaments: all pairs occur once in n - 1 rounds (n, of an odd number);
    of more than `most` rounds, some that are spread evenly.
    """
    seats: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    count, found = len(seats), []
    for _ in range(max(0, count - 1)):
        pairs = zip(seats[: count // 2], reversed(seats[count // 2 :]), strict=True)
        found.append([(first, second) for first, second in pairs if first is not None and second is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    if len(found) > most:
        found = [found[index * len(found) // most] for index in range(most)]
    return found


def second_opinions(suspects: Sequence[str], trusted: Sequence[str], most: int) -> list[list[Pair]]:
    """Pairings of suspects with nodes that are above suspicion, so that only they can be to blame."""
    found = []
    for turn in range(min(most, len(trusted))):
        partners = [trusted[(turn + index) % len(trusted)] for index in range(len(trusted))]
        found.append(list(zip(suspects, partners, strict=False)))
    return found


def suspicions(found: Measurements) -> list[Suspicion]:
    """Every slow node, GPU and link."""
    slow = [*_slow_products(found), *_slow_nodes(found)]
    blamed = {node for each in slow if each.gpu is None for node in each.nodes}
    return [*slow, *_slow_links(found, blamed)]


def best_pairs(found: Measurements) -> dict[str, float]:
    """Node -> bandwidth of its best pair."""
    best: dict[str, float] = {}
    for pair, bandwidth in found.pairs.items():
        for node in pair:
            best[node] = max(best.get(node, 0.0), bandwidth)
    return best


def _slow_products(found: Measurements) -> Iterator[Suspicion]:
    rates = [rate for each in found.products.values() for rate in each]
    if len(found.products) < 3 and len(rates) < 3:
        return  # With two it could be either.
    usual, limit = median(rates), SLOW_PRODUCT[found.device]
    for node, each in found.products.items():
        for index, rate in enumerate(each):
            if rate < limit * usual:
                what = "matrix products" if len(each) == 1 else f"GPU {index}: matrix products"
                why = f"{what} run at {rate / usual:.0%} of the usual rate ({rate / 1e9:.3g} GFLOP/s)"
                yield Suspicion(nodes=(node,), why=why, gpu=None if found.device == "cpu" else index)


def _slow_nodes(found: Measurements) -> Iterator[Suspicion]:
    best = best_pairs(found)
    if len(best) < 3:
        return
    usual = median(best.values())
    for node, bandwidth in best.items():
        if bandwidth == 0.0:
            why = next((why for pair, why in found.errors.items() if node in pair), "no answer")
            yield Suspicion(nodes=(node,), why=f"no all-reduce with any other node works: {why}")
        elif bandwidth < SLOW_NODE[found.device] * usual:
            speed = f"{bandwidth / 1e6:.3g} MB/s, the others {usual / 1e6:.3g} MB/s"
            why = f"its link runs at {bandwidth / usual:.0%} of the usual bandwidth ({speed})"
            yield Suspicion(nodes=(node,), why=why)


def _slow_links(found: Measurements, blamed: set[str]) -> Iterator[Suspicion]:
    best = best_pairs(found)
    for pair, bandwidth in found.pairs.items():
        lowest = min(best[node] for node in pair)
        if blamed & set(pair) or bandwidth >= SLOW_PAIR[found.device] * lowest > 0:
            continue
        if bandwidth > 0:
            why = f"{bandwidth / 1e6:.3g} MB/s, with other nodes each reaches {lowest / 1e6:.3g} MB/s"
        else:
            why = f"the all-reduce fails: {found.errors.get(pair, 'no answer')}"
        yield Suspicion(nodes=pair, why=why)
