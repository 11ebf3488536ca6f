"""Random faults, from a seed: what happens to a run, in which order, and when."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from llmtrain.run.checkpoints import list_checkpoints
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import read_holder
from tests.support import stand_in_runs as runs

STEPS = 30
KINDS = ("rank", "agent", "launcher", "supervisor", "preempt", "error", "disk", "corrupt")
"""rank, agent, launcher, supervisor: killed; preempt: the supervisor is asked to leave; error: a rank's code
raises; disk: saves find no room for a while; corrupt: the newest checkpoint is damaged, and a rank dies."""
BY_RECIPE = {"error": "error", "disk": "full_disk"}
"""Faults that the recipe injects itself."""


@dataclass(frozen=True)
class Fault:
    """One fault, once a step is done."""

    kind: str
    step: int
    rank: int


def draw(seed: int, ranks: int, count: int = 2) -> tuple[Fault, ...]:
    """Faults in the order of their steps; at least eight steps lie between two, so that each meets a run that
    trains. Over the seeds, every kind comes first as often as the others."""
    chance = random.Random(seed)
    kinds = [KINDS[seed % len(KINDS)], *(chance.choice(KINDS) for _ in range(count - 1))]
    room = (STEPS - 4) // count
    return tuple(
        Fault(kind, chance.randint(2 + room * index, room * (index + 1) - 6), chance.randrange(ranks))
        for index, kind in enumerate(kinds)
    )


def injected(faults: Sequence[Fault]) -> str:
    """The recipe's override for the faults that it injects itself, and for steps that are slow enough to be
    struck."""
    entries = ["{kind: slow, step: 1, steps: 1000, seconds: 50ms}"]
    entries += [
        f"{{kind: {BY_RECIPE[fault.kind]}, step: {fault.step}, rank: {fault.rank}, "
        f"steps: {4 if fault.kind == 'disk' else 1}}}"
        for fault in faults
        if fault.kind in BY_RECIPE
    ]
    return f"faults.inject=[{', '.join(entries)}]"


def strike(run: RunDir, fault: Fault) -> bool:
    """Make a fault of a running run happen; whether its supervisor leaves by it."""
    with suppress(ProcessLookupError, psutil.Error, IndexError, AssertionError):
        match fault.kind:
            case "rank":
                os.kill(runs.rank_pid(run, fault.rank), signal.SIGKILL)
            case "agent":
                os.kill(runs.agent_pid(run), signal.SIGKILL)
            case "launcher":
                psutil.Process(runs.agent_pid(run)).children()[0].kill()
            case "corrupt":
                damage_newest(run)
                os.kill(runs.rank_pid(run, fault.rank), signal.SIGKILL)
            case "supervisor" | "preempt":
                holder = read_holder(run)
                if holder is not None and holder.is_alive:
                    number = signal.SIGKILL if fault.kind == "supervisor" else signal.SIGTERM
                    os.kill(holder.process.pid, number)
                    return True
    return False


def damage_newest(run: RunDir) -> None:
    """Flip bits of the newest checkpoint, if there is an older one to go on from."""
    found = list_checkpoints(run.checkpoints)
    if len(found) < 2:
        return
    shard = next(iter(sorted(found[0].path.glob("*.safetensors"))))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0xFF
    shard.write_bytes(data)
