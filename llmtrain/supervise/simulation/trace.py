"""What goes wrong with a simulated cluster, and when: seeded, at published or given rates. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from llmtrain.units import DAY

Kind = Literal["rank", "node", "hang", "slow_save", "slow_node"]
"""rank: a process dies, and a restart cures it; node: a node is gone until it is repaired; hang: a rank comes
to no collective any more; slow_save: a save that takes long, and nothing is wrong; slow_node: a node that
computes longer than the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One thing that happens."""

    at: float
    """Seconds since the beginning."""
    kind: Kind
    node: int
    repair: float = 0.0
    """Of a node: seconds until it is back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How often what happens, of all nodes together."""

    interruptions_per_day: float
    shares: Mapping[Kind, float]
    """Of the interruptions, by kind; sums to 1."""
    repair: float
    """Mean seconds until a lost node is back."""
    harmless_per_day: float = 2.0
    """Slow saves, which must raise no alarm."""
    slow_nodes_per_day: float = 0.5


def draw_trace(rates: Rates, nodes: int, seconds: float, seed: int) -> tuple[Incident, ...]:
    """Incidents in order of time: independent of each other, evenly over the nodes (Poisson), with repairs
    that last exponentially long, but no less than ten minutes."""
    chance = random.Random(seed)
    kinds = list(rates.shares)
    found: list[Incident] = []

    def moments(per_day: float) -> list[float]:
        at, out = 0.0, []
        while per_day > 0 and (at := at + chance.expovariate(per_day / DAY)) < seconds:
            out.append(at)
        return out

    for at in moments(rates.interruptions_per_day):
        [kind] = chance.choices(kinds, [rates.shares[each] for each in kinds])
        repair = max(600.0, chance.expovariate(1.0 / rates.repair)) if kind == "node" else 0.0
        found.append(Incident(at=at, kind=kind, node=chance.randrange(nodes), repair=repair))
    found += [
        Incident(at=at, kind="slow_save", node=chance.randrange(nodes))
        for at in moments(rates.harmless_per_day)
    ]
    found += [
        Incident(at=at, kind="slow_node", node=chance.randrange(nodes))
        for at in moments(rates.slow_nodes_per_day)
    ]
    return tuple(sorted(found, key=lambda incident: incident.at))
