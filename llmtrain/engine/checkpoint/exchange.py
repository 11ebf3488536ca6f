"""How ranks agree on a save beside the training: through the process group's store, never by a collective.

A collective in another thread could get between those of a step, and one rank that is late would break its
group for good. Keys in a store wait for whoever comes late.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from llmtrain.engine.checkpoint.pieces import Ranks

LIMIT = timedelta(hours=2)
"""For the slowest rank to write its shard; a rank that is gone ends the attempt long before."""


def beside(ranks: Ranks, name: str) -> Ranks:
    """The same ranks, as they agree in a thread of their own called `name`. To be called by all together."""
    if ranks.world_size == 1:
        return ranks
    exchange = StoreExchange(name, ranks.rank, ranks.world_size)
    return Ranks(ranks.rank, ranks.world_size, exchange, exchange.begin)


class StoreExchange:
    """Gathers a text from every rank, in rank order, on every rank. One thread of each rank may use it; it
    has a connection of its own, since waiting on one blocks it."""

    def __init__(self, name: str, rank: int, world_size: int, limit: timedelta = LIMIT) -> None:
        """`name` tells it apart from others. To be called on all ranks, after the process group is up."""
        self._rank, self._world_size = rank, world_size
        own = _get_default_store().clone()  # type: ignore[attr-defined]  # the stubs lack it
        self._store = PrefixStore(f"llmtrain/{name}", own)
        self._store.set_timeout(limit)
        self._round = self._turn = 0
        self._read: list[str] = []

    def begin(self, number: int) -> None:
        """Start a round of exchanges; rounds are numbered alike on all ranks, so that one that failed half
        way does not matter to the next."""
        self._round, self._turn = number, 0

    def __call__(self, text: str) -> Sequence[str]:
        """Exchange; a barrier. Raises RuntimeError when a rank stays away."""
        self._turn += 1
        self._store.set(self._key(self._rank), text)
        if self._rank == 0:
            keys = [self._key(rank) for rank in range(self._world_size)]
            texts = [value.decode() for value in self._store.multi_get(keys)]
            self._store.set(self._key("all"), json.dumps(texts))
            for key in self._read:  # all have come to this turn, so all have read the one before
                self._store.delete_key(key)
            self._read = [*keys, self._key("all")]
            return texts
        return list(json.loads(self._store.get(self._key("all")).decode()))

    def _key(self, rank: int | str) -> str:
        return f"{self._round}/{self._turn}/{rank}"
