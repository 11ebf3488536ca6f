"""The one table of the variables that torchrun and the agent give a rank; no other file of the engine reads
the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmtrain.errors import Problem, UsageError
from llmtrain.run.markers import STANDBY_MARKER

VARIABLES: dict[str, str] = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
}
"""Our word -> torchrun's."""

ATTEMPT_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Holds `<run id>.<attempt>`, as the node script gives it to torchrun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """A rank's place in the world, and which attempt of which run it belongs to."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    run_id: str
    attempt: int
    standby: bool = False
    """Whether it is to wait until the attempt begins: until its standard input ends."""


def check_place(env: RankEnv, ranks: Sequence[Sequence[int]]) -> None:
    """Raise UsageError when this rank is not the one that its node and place there stand for in the attempt.

    A rank that is there twice, or a node that took another one's number, would otherwise show as a hang.
    """
    if not ranks:
        return
    try:
        meant = ranks[env.node_rank][env.local_rank]
    except IndexError:
        meant = None
    if meant != env.rank:
        should = "no rank is meant to be" if meant is None else f"rank {meant} is meant to be"
        raise UsageError(
            f"this is rank {env.rank}, but {should} at local rank {env.local_rank} of node {env.node_rank}",
            hint="attempt.json says which ranks each node has; start ranks with `llmtrain launch`",
        )


def read_rank_env(environment: Mapping[str, str] | None = None) -> RankEnv:
    """Read torchrun's variables; raises UsageError that names each missing or odd one."""
    source = os.environ if environment is None else environment
    numbers: dict[str, int] = {}
    wrong: list[Problem] = []
    for word, variable in VARIABLES.items():
        text = source.get(variable, "")
        if text.isdigit():
            numbers[word] = int(text)
        else:
            wrong.append(Problem(variable, f"is {text!r}, not a number" if text else "is not set"))
    run_id, dot, attempt = source.get(ATTEMPT_VARIABLE, "").rpartition(".")
    if not dot or not attempt.isdigit():
        found = source.get(ATTEMPT_VARIABLE, "")
        wrong.append(Problem(ATTEMPT_VARIABLE, f"is {found!r}, not <run id>.<attempt>"))
    if wrong:
        raise UsageError(
            "a rank needs torchrun's variables: " + "; ".join(f"{p.where} {p.message}" for p in wrong),
            hint="start ranks with `llmtrain launch`, or with torchrun --rdzv-id=<run id>.<attempt>",
        )
    standby = source.get(STANDBY_MARKER) == "1"
    return RankEnv(run_id=run_id, attempt=int(attempt), standby=standby, **numbers)
