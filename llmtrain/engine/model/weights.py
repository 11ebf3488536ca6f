"""How a stage comes by the weights of its parts: they are simply there, or somebody brings them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Weights(Protocol):
    """What a stage calls for each of its sites: the embedding, each block, the head."""

    def use(self, site: int, work: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Return work(inputs), with the site's weights there for it and for its backward pass."""
        ...


class WeightsInPlace:
    """Weights that are always there."""

    def use(self, site: int, work: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """See `Weights.use`."""
        return work(inputs)
