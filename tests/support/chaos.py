"""Random faults, from a seed: on which backend, what happens to a run, when, to whom. Pure.

A seed is all that a case depends on: `LLMTRAIN_CHAOS_SEED=17` plays that one again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 60
SAMPLE = 20
"""Seeds that CI plays: each with two faults and the cheapest layout; later ones vary more."""
SHARES = ("local", "ssh", "local", "ssh", "local", "slurm", "local", "ssh", "local", "slurm")
"""Backends of ten seeds in a row."""
FILES = {
    "local": "tests/e2e/test_chaos.py",
    "ssh": "tests/ssh/test_ssh_chaos.py",
    "slurm": "tests/slurm/test_slurm_chaos.py",
}

PROCESSES = ("rank", "agent", "launcher", "frozen_rank", "supervisor", "preempt", "corrupt")
"""Faults that every backend knows. rank, agent, launcher, supervisor: killed; frozen_rank: SIGSTOP;
preempt: the supervisor is asked to leave; corrupt: the newest checkpoint is damaged, and a rank dies."""
KINDS = {
    "local": ("error", "rank", "disk", *PROCESSES[1:]),
    "ssh": ("power", "linkdown", "full", "crash", "flap", "freeze", *PROCESSES),
    "slurm": (
        *("down", "requeue", "kill_step", "batch_host", "crash", "cancel", "kill_job", "warning"),
        *("controller", "power", "full", *PROCESSES),
    ),
}
"""error: a rank's code raises; disk: saves find no room; full: the shared storage has none for a while.

Nodes. power: dead without a word; linkdown: cut off; crash: all its processes die; freeze: all are stopped;
flap: cut off for a moment; down: the scheduler takes it away; batch_host: the supervisor's own node crashes.

Jobs. requeue, cancel, warning: the scheduler preempts, an administrator cancels, time runs out; kill_step,
kill_job: `scancel --signal=KILL` of an agent's step, the job; controller: slurmctld is away for a while."""
BY_RECIPE = {"error": "error", "disk": "full_disk"}
"""Faults that the recipe injects itself."""
LOSES_A_NODE = ("power", "linkdown", "crash", "freeze", "down", "batch_host", "agent", "kill_step")
NEEDS_ALL_NODES = ("batch_host", "requeue", "cancel", "kill_job", "warning", "preempt")
"""Whoever starts the job again needs as many nodes as it had."""
NEED_STEPS = ("frozen_rank",)
"""A hang is soon seen only once the attempt has measured twenty steps."""
LOSABLE = 2
"""Of a run's three nodes."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    kind: str
    step: int
    """It strikes once this step is done."""
    place: int
    """Picks the rank or the node, modulo how many there are."""
    seconds: float
    """How long a fault lasts that passes by itself."""
    after: float | None = None
    """It strikes so many seconds after the one before, whatever the run does then."""
    mends: bool = False
    """Whether nodes that were broken before are whole again before it strikes."""

    def __str__(self) -> str:
        when = f"after step {self.step}" if self.after is None else f"{self.after:.1f} s later"
        mended = "nodes whole again, " if self.mends else ""
        return f"{mended}{self.kind} ({self.place}) {when}"


@dataclass(frozen=True)
class Case:
    """What one seed stands for."""

    seed: int
    backend: str
    shape: int
    """Which of the backend's layouts."""
    faults: tuple[Fault, ...]
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = ", ".join([*map(str, self.faults), *self.overrides])
        again = f"LLMTRAIN_CHAOS_SEED={self.seed} pytest -s {FILES[self.backend]}"
        return f"chaos seed {self.seed} on {self.backend}, shape {self.shape}: {told}; again: {again}"


def seeds_of(backend: str) -> list[int]:
    """Seeds of a backend that are to be played."""
    if one := os.environ.get("LLMTRAIN_CHAOS_SEED"):
        seeds: Sequence[int] = [int(one)]
    else:
        seeds = range(int(os.environ.get("LLMTRAIN_CHAOS_SEEDS", SAMPLE)))
    return [seed for seed in seeds if SHARES[seed % len(SHARES)] == backend]


def draw(seed: int) -> Case:
    """The case of a seed. Over the seeds of a backend, every kind comes as often as the others."""
    chance = random.Random(seed)
    rounds, place = divmod(seed, len(SHARES))
    backend = SHARES[place]
    kinds = KINDS[backend]
    turn = rounds * SHARES.count(backend) + SHARES[:place].count(backend)
    varied = seed >= SAMPLE
    count = chance.choice((2, 2, 3)) if varied else 2
    chosen = _kinds(chance, kinds, count, turn, varied=varied)
    faults = tuple(_fault(chance, kind, index, len(chosen)) for index, kind in enumerate(chosen))
    overrides = tuple(text for text in VARIATIONS if varied and chance.random() < 0.25)
    return Case(seed, backend, chance.randrange(2) if varied else 0, faults, overrides)


def _kinds(chance: random.Random, kinds: Sequence[str], count: int, turn: int, *, varied: bool) -> list[str]:
    """Kinds of the faults of a case. In the sample they go through all kinds in turn, two a case; later the
    first one does, and the others are drawn."""
    if not varied:
        found = [kinds[2 * turn % len(kinds)], kinds[(2 * turn + 1) % len(kinds)]]
        # The recipe's own happen in the first attempt only.
        return sorted(found, key=lambda kind: kind not in BY_RECIPE)
    found = [kinds[turn % len(kinds)]]
    while len(found) < (2 if found[0] in NEED_STEPS else count):
        lost = sum(kind in LOSES_A_NODE for kind in found)
        unfit = (*BY_RECIPE, *(NEED_STEPS if count > 2 else ()), *(LOSES_A_NODE if lost >= LOSABLE else ()))
        found.append(chance.choice([kind for kind in kinds if kind not in unfit]))
    return found


VARIATIONS = ("faults.standby_after=1s", "checkpoint.memory.every_steps=2", "checkpoint.every_steps=7")


def _fault(chance: random.Random, kind: str, index: int, count: int) -> Fault:
    """Some steps lie between two faults, so that each meets a run that trains; but for a quarter of
    them, which meet one that is just recovering."""
    room = (STEPS - 4) // count
    step = chance.randint(2 + room * index, room * (index + 1) - 4)
    if kind in NEED_STEPS:
        step = room * (index + 1) - 4
    is_early = index > 0 and kind not in (*BY_RECIPE, *NEED_STEPS) and chance.random() < 0.25
    return Fault(
        kind=kind,
        step=step,
        place=chance.randrange(6),
        seconds=round(chance.uniform(1.0, 5.0), 1),
        after=round(chance.uniform(0.0, 8.0), 1) if is_early else None,
        mends=index > 0 and (chance.random() < 0.5 or kind in NEEDS_ALL_NODES),
    )


def injected(faults: Sequence[Fault], ranks: int) -> str:
    """The recipe's override for the faults that it injects itself, and for steps that are slow enough to be
    struck."""
    entries = ["{kind: slow, step: 1, steps: 1000, seconds: 100ms}"]
    entries += [
        f"{{kind: {BY_RECIPE[fault.kind]}, step: {fault.step}, rank: {fault.place % ranks}, "
        f"steps: {4 if fault.kind == 'disk' else 1}}}"
        for fault in faults
        if fault.kind in BY_RECIPE
    ]
    return f"faults.inject=[{', '.join(entries)}]"
