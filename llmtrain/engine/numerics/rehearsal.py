"""Which faults of `faults.inject` act at all, so that nothing is told that did not happen."""

from __future__ import annotations

from llmtrain.config.layout import Layout
from llmtrain.config.model import ModelConfig
from llmtrain.config.numerics import InjectedFault
from llmtrain.engine.parallel.pipeline import stage_places

IN_A_LAYER = frozenset({"nan", "overflow", "bit_flip"})
EVERY_ATTEMPT = IN_A_LAYER | {"bad_batch", "slow", "slow_disk"}
"""The others happen in a run's first attempt only: a restart cures them."""


def why_idle(fault: InjectedFault, model: ModelConfig, layout: Layout, attempt: int) -> str:
    """Why a fault does nothing in an attempt; empty: it acts."""
    if fault.kind == "bad_batch":
        return ""
    if fault.rank >= layout.world_size:
        return f"there is no rank {fault.rank}, ranks are 0 to {layout.world_size - 1}"
    if fault.kind in IN_A_LAYER and fault.layer not in (held := _layers_of(fault.rank, model, layout)):
        return f"rank {fault.rank} does not hold layer {fault.layer}, but {', '.join(map(str, held))}"
    if fault.kind == "bit_flip" and layout.zero == 3:
        return "with zero 3 no rank keeps the weights that it computes with"
    if fault.kind not in EVERY_ATTEMPT and attempt > 1:
        return "it happens in the first attempt only"
    return ""


def _layers_of(rank: int, model: ModelConfig, layout: Layout) -> list[int]:
    stages = stage_places(model, layout, layout.dims.coordinate(rank).pp)
    return [layer for stage in stages for layer in range(stage.first_layer, stage.first_layer + stage.layers)]
