"""A layout: the parallel degrees and the knobs that go with them, all decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmtrain.config.fields import PositiveInt
from llmtrain.parallel_dims import ParallelDims

Schedule = Literal["1f1b", "interleaved", "zero-bubble"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to lay a model over ranks.

    Accumulation follows: micro_batches(replica) x micro_batch sums to the global batch.
    """

    dp: PositiveInt = 1
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    vpp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    zero: Literal[0, 1, 2, 3] = 1
    sequence_parallel: bool = False
    micro_batch: PositiveInt = 1
    schedule: Schedule = "1f1b"
    recompute: Recompute = "none"

    @property
    def dims(self) -> ParallelDims:
        """The axes alone."""
        return ParallelDims(dp=self.dp, pp=self.pp, cp=self.cp, tp=self.tp, ep=self.ep)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    def micro_batches(self, global_batch: int) -> tuple[int, ...]:
        """Micro-batches of each replica; replicas differ by at most one when dp does not divide them.

        Raises ValueError when micro_batch does not divide the global batch or a replica would have none.
        """
        total, rest = divmod(global_batch, self.micro_batch)
        if rest:
            raise ValueError(f"micro_batch={self.micro_batch} does not divide batch.global={global_batch}")
        if total < self.dp:
            raise ValueError(f"{total} micro-batches are fewer than dp={self.dp} replicas")
        share, extra = divmod(total, self.dp)
        return tuple(share + (1 if replica < extra else 0) for replica in range(self.dp))

    def first_sample(self, replica: int, global_batch: int) -> int:
        """Offset of a replica's first sequence inside the global batch.

        Samples are consecutive per replica.
        """
        return self.micro_batch * sum(self.micro_batches(global_batch)[:replica])
