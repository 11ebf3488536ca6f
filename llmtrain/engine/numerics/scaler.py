"""Dynamic loss scaling (Micikevicius et al. 2018), as `torch.amp.GradScaler` does it, within bounds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmtrain.config.numerics import LossScaleConfig

LOWEST, HIGHEST = 2.0**3, 2.0**24
ROOM = 2.0**10
"""An overflow at a scale up to this is no probing of the limit: something is wrong with a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The scale, the same on all ranks."""

    scale: float
    clean_steps: int = 0
    """Steps in a row without overflow since the scale last changed."""
    overflows: int = 0
    """Steps that overflowed, over the whole training."""

    def after(self, config: LossScaleConfig, *, overflow: bool) -> LossScale:
        """The scale of the next step."""
        if overflow:
            halved = max(LOWEST, self.scale / 2)
            return LossScale(scale=halved, clean_steps=0, overflows=self.overflows + 1)
        if self.clean_steps + 1 < config.growth_steps:
            return replace(self, clean_steps=self.clean_steps + 1)
        return replace(self, scale=min(HIGHEST, self.scale * 2), clean_steps=0)
