"""The data-parallel replicas as a bucket sees them: gradients are summed and scattered over them, parameters
gathered from them, on one level or on two.

Two levels, where several replicas share a node: the sum is formed inside each node first, and each of its
members then talks to its counterparts on the other nodes about its own part alone, so that a gradient crosses
the links between nodes once a node, not once a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from llmtrain.engine.parallel.compression import Codec
from llmtrain.engine.parallel.groups import DONE, Group, Pending


class Chain(Pending):
    """Collectives one after the other; each starts when the one before it has arrived."""

    __slots__ = ("_current", "_rest", "_then")

    def __init__(
        self, steps: Sequence[Callable[[], Pending]], then: Callable[[], None] | None = None
    ) -> None:
        """`then` runs once, when the last one has arrived."""
        super().__init__()
        self._current, self._rest, self._then = steps[0](), list(steps[1:]), then

    def advance(self) -> None:
        """Wait for the collective under way and start the next one; nothing when it is the last."""
        if self._rest:
            self._current.wait()
            self._current = self._rest.pop(0)()

    def wait(self) -> None:
        """Wait for the last one. Idempotent."""
        while self._rest:
            self.advance()
        self._current.wait()
        self._current = DONE
        if self._then is not None:
            self._then()
            self._then = None


class Replicas:
    """The replicas of this rank's parameters."""

    def __init__(self, levels: Sequence[Group], communication: str = "fp32") -> None:
        """`levels`: the group of all replicas, or those inside the node and those across nodes."""
        self.levels = tuple(levels)
        self.size = prod(level.size for level in levels)
        self.index = 0
        """Which shard this rank keeps: parts are cut by the first level, then by the second."""
        for level in levels:
            self.index = self.index * level.size + level.index
        self.communication = communication
        self.codec = None if communication == "fp32" or self.size == 1 else Codec(communication)

    def new_errors(self, elements: int, device: torch.device) -> list[Tensor]:
        """Buffers for what rounding leaves out of a bucket's gradients, one a level."""
        found: list[Tensor] = []
        if self.codec is None or not self.codec.has_errors:
            return found
        for level in self.levels:
            found.append(torch.zeros(elements, dtype=torch.float32, device=device))
            elements //= level.size
        return found

    def start_reduce_scatter(
        self,
        part: Tensor,
        full: Tensor,
        errors: Sequence[Tensor] = (),
        then: Callable[[], None] | None = None,
    ) -> Pending:
        """Begin to sum `full`, FP32, over the replicas; `part` gets this rank's shard; `then` runs when it is
        there. `full` may be changed, and must not be touched before the end."""
        steps, source = [], full
        for number, level in enumerate(self.levels):
            last = number == len(self.levels) - 1
            target = part if last else full.new_empty(source.numel() // level.size)
            steps.append(self._step(level, target, source, errors[number] if errors else None))
            source = target
        return Chain(steps, then)

    def _step(self, level: Group, part: Tensor, full: Tensor, errors: Tensor | None) -> Callable[[], Pending]:
        codec = self.codec
        if codec is None:
            return lambda: level.start_reduce_scatter(part, full)

        def start() -> Pending:
            encoded = codec.encode(full.view(level.size, -1), errors)
            received = torch.empty_like(encoded)
            arriving = level.start_all_to_all(received, encoded)

            def finish() -> None:
                arriving.wait()
                codec.decode_sum(received, part)

            return Pending(finish=finish)

        return start

    def start_all_reduce(self, full: Tensor) -> Pending:
        """Begin to sum a whole bucket over the replicas, in place; never compressed."""
        if len(self.levels) == 1:
            return self.levels[0].start_all_reduce(full)
        inside, across = self.levels
        part = full.view(inside.size, -1)[inside.index]
        mine = torch.empty_like(part)

        def gather() -> Pending:
            part.copy_(mine)
            return inside.start_all_gather(full, part)

        return Chain(
            [
                lambda: inside.start_reduce_scatter(mine, full),
                lambda: across.start_all_reduce(mine),
                gather,
            ]
        )

    def start_all_gather(self, full: Tensor, part: Tensor) -> Pending:
        """Begin to gather every replica's shard into `full`; `part` may be its own place there."""
        if len(self.levels) == 1:
            return self.levels[0].start_all_gather(full, part)
        inside, across = self.levels
        mine = full.view(inside.size, -1)[inside.index]
        return Chain(
            [lambda: across.start_all_gather(mine, part), lambda: inside.start_all_gather(full, mine)]
        )
