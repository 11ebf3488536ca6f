"""Faults x layouts: what is injected where, and what must be told of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from llmtrain.config.layout import Layout
from llmtrain.config.numerics import (
    CorruptionConfig,
    InjectedFault,
    LayerPrecisionConfig,
    LearningRateConfig,
    PrecisionConfig,
    SpikeConfig,
    StabilityConfig,
)
from llmtrain.config.recipe import FaultConfig, Recipe
from llmtrain.engine.state import state_pieces
from llmtrain.engine.step import Wishes, train_step
from tests.support.engine_cases import Case, build, llama, recipe

STEPS, LONG = 12, 36
"""A bad batch is a spike only for a model that has learnt something."""
QUIET = {"fault_injected", "gradients_measured"}
"""Events that say nothing about a reaction."""

LAYOUTS: dict[str, Layout] = {
    "one": Layout(micro_batch=2),
    "full": Layout(micro_batch=2, recompute="full"),
    "dp2": Layout(dp=2, micro_batch=2),
    "dp2-zero0": Layout(dp=2, micro_batch=2, zero=0),
    "dp2-zero2": Layout(dp=2, micro_batch=2, zero=2),
    "dp2-zero3": Layout(dp=2, micro_batch=2, zero=3),
    "tp2": Layout(tp=2, micro_batch=2),
    "tp2-sp": Layout(tp=2, micro_batch=2, sequence_parallel=True),
    "pp2": Layout(pp=2, micro_batch=2),
    "pp2-vpp2": Layout(pp=2, vpp=2, schedule="interleaved", micro_batch=2),
    "pp2-zb": Layout(pp=2, schedule="zero-bubble", micro_batch=2),
    "dp3": Layout(dp=3, micro_batch=1),
    "dp2-pp2": Layout(dp=2, pp=2, micro_batch=2),
    "2x2x2": Layout(dp=2, tp=2, pp=2, micro_batch=2),
    "2x2x2-sp-zb": Layout(dp=2, tp=2, pp=2, schedule="zero-bubble", sequence_parallel=True, micro_batch=2),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One line of the table."""

    layout: str
    mode: str
    fault: InjectedFault
    told: tuple[str, ...]
    """Kinds of events that must be told, in order, besides the injection."""
    layer: str = ""
    """Layer that must be named."""
    stability: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.01
    """Largest relative difference of the final loss from a clean run's."""

    @property
    def name(self) -> str:
        """For the table."""
        fault = self.fault
        hits = f"{fault.kind}{fault.steps if fault.steps > 1 else ''}{'-twice' if fault.passes > 1 else ''}"
        return f"{self.mode}-{self.layout}-{hits}-r{fault.rank}-l{fault.layer}-{'-'.join(self.stability)}"


@dataclass
class Seen:
    """What one rank saw of a run."""

    losses: list[float] = field(default_factory=list)
    told: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    updates: int = 0
    scale: float = 1.0
    all_finite: bool = True
    """Whether masters and moments were finite after every step."""
    weights: list[float] = field(default_factory=list)
    """Sum of every piece of the masters, exactly as they are."""


def fault_recipe(
    mode: str,
    faults: tuple[InjectedFault, ...] = (),
    stability: dict[str, Any] | None = None,
    *,
    steps: int = STEPS,
) -> Recipe:
    """A training whose last steps count little each, so that one less is no other result."""
    learns = LearningRateConfig(peak=3e-3, final=1e-5, warmup_steps=2, schedule="wsd", decay_steps=steps // 3)
    flat = LearningRateConfig(peak=3e-4, warmup_steps=2, schedule="constant")
    made = recipe(llama(), mode=mode, steps=steps)
    layers = LayerPrecisionConfig(strikes=2, hold_steps=4)
    return replace(
        made,
        precision=PrecisionConfig(mode=mode, layers=layers),  # type: ignore[arg-type]
        learning_rate=learns if steps == LONG else flat,
        stability=StabilityConfig(**(stability or {})),
        faults=FaultConfig(inject=faults),
    )


def watch(rank: int, made: Recipe, layout: Layout) -> Seen:
    """Train and look at everything after every step."""
    torch.set_num_threads(1)
    parts = build(Case(made, layout), rank)
    parts.guard.resume(parts.guard.state, 0)
    seen = Seen()
    for step in range(1, made.train.steps + 1):
        result = train_step(parts, step, Wishes())
        parts.guard.keep(step)
        seen.losses.append(result.loss)
        for event in parts.guard.events:
            fields = {name: getattr(event, name) for name in event.__slots__}
            seen.told.append((step, event.kind, fields))
        for piece in state_pieces(parts.buckets, parts.groups):
            seen.all_finite &= bool(piece.data.isfinite().all())
    pieces = list(state_pieces(parts.buckets, parts.groups))
    seen.weights = [float(piece.data.double().sum()) for piece in pieces]
    seen.updates, seen.scale = parts.guard.state.updates, parts.guard.state.scale
    return seen


def watch_all(rank: int, world_size: int, runs: list[tuple[Recipe, Layout]]) -> list[Seen]:
    """Several runs one after the other in the same world."""
    return [watch(rank, made, layout) for made, layout in runs]


def nan(step: int = 5, **fields: Any) -> InjectedFault:
    """A NaN in a layer's output."""
    return InjectedFault(kind="nan", step=step, **fields)


def overflow(step: int = 5, **fields: Any) -> InjectedFault:
    """An infinite gradient in a layer."""
    return InjectedFault(kind="overflow", step=step, **fields)


def flip(step: int = 5, **fields: Any) -> InjectedFault:
    """A flipped bit."""
    return InjectedFault(kind="bit_flip", step=step, **fields)


def noise(step: int = 30, **fields: Any) -> InjectedFault:
    """A bad batch."""
    return InjectedFault(kind="bad_batch", step=step, **fields)


AGAIN = ("step_recomputed",)
SKIPPED = ("step_recomputed", "samples_skipped")
THRICE = (*SKIPPED, *SKIPPED, "step_recomputed", "rewound", "samples_skipped")
SCALED = ("step_recomputed", "loss_scaled")
WATCHED = {"corruption": CorruptionConfig(every=1)}
CORRUPT = ("corruption_found", "step_recomputed")
KEPT = {"snapshot_every": 3}
SKIPS = {"spikes": SpikeConfig(action="skip", window=8, threshold=5.0)}
REWINDS = {"spikes": SpikeConfig(action="rewind", window=8, threshold=5.0), "snapshot_every": 4}
LOGS = {"spikes": SpikeConfig(window=8, threshold=5.0)}


def _row(layout: str, mode: str, fault: InjectedFault, told: tuple[str, ...], **more: Any) -> Fault:
    layer = f"layers.{fault.layer}" if fault.kind in ("nan", "overflow") else ""
    return Fault(layout=layout, mode=mode, fault=fault, told=told, layer=layer, **more)


TABLE: tuple[Fault, ...] = (
    # One process
    _row("one", "fp32", nan(layer=2), AGAIN),
    _row("one", "bf16", nan(layer=0), AGAIN),
    _row("one", "bf16", nan(layer=3, passes=2), SKIPPED),
    _row("one", "bf16", nan(layer=1, passes=2, steps=3), THRICE, stability=KEPT),
    _row("full", "bf16", nan(layer=1), AGAIN),
    _row("one", "fp16", overflow(layer=2, steps=3), SCALED * 3),
    _row(
        "one", "fp16", overflow(layer=1), ("samples_skipped", "loss_scaled"), stability={"nonfinite": "skip"}
    ),
    _row("one", "bf16", overflow(layer=3, steps=2), (*AGAIN, *AGAIN, "layer_precision_changed")),
    _row("one", "bf16", noise(), ("spike_found", "samples_skipped"), stability=SKIPS),
    _row("one", "bf16", noise(), ("spike_found", "rewound", "samples_skipped"), stability=REWINDS),
    _row("one", "bf16", flip(layer=2), CORRUPT, stability=WATCHED),
    # Replicas
    _row("dp2", "bf16", nan(layer=1, rank=1), AGAIN),
    _row("dp2", "fp32", nan(layer=1, rank=1), AGAIN),
    _row("dp2", "bf16", flip(layer=1, rank=1), CORRUPT, stability=WATCHED),
    _row("dp2", "bf16", flip(layer=3, rank=0), CORRUPT, stability=WATCHED),
    _row("dp2-zero0", "bf16", flip(layer=3, rank=1), CORRUPT, stability=WATCHED),
    _row("dp2-zero0", "bf16", nan(layer=3, rank=1), AGAIN),
    _row("dp2-zero2", "bf16", nan(layer=2, rank=1), AGAIN),
    _row("dp2-zero3", "bf16", nan(layer=2, rank=1), AGAIN),
    _row("dp2-zero3", "fp16", overflow(layer=2, rank=0), SCALED),
    _row("dp2", "bf16", noise(rank=1), ("spike_found", "samples_skipped"), stability=SKIPS),
    # Tensor parallel
    _row("tp2", "bf16", nan(layer=2, rank=1), AGAIN),
    _row("tp2", "fp16", overflow(layer=1, rank=0), SCALED),
    _row("tp2-sp", "bf16", nan(layer=1, rank=1, passes=2), SKIPPED),
    # Tensor-parallel ranks share their gradients: the first of them is named.
    _row("tp2-sp", "bf16", overflow(layer=2, rank=0, steps=2), (*AGAIN, *AGAIN, "layer_precision_changed")),
    # Pipelines
    _row("pp2", "bf16", nan(layer=0, rank=0), AGAIN),
    _row("pp2", "bf16", overflow(layer=3, rank=1, steps=2), (*AGAIN, *AGAIN, "layer_precision_changed")),
    _row("pp2-vpp2", "bf16", nan(layer=2, rank=0), AGAIN),
    _row("pp2-vpp2", "fp16", overflow(layer=1, rank=1, steps=2), SCALED * 2),
    _row("pp2-zb", "bf16", nan(layer=3, rank=1, passes=2), SKIPPED),
    _row("pp2-zb", "fp16", overflow(layer=3, rank=1), SCALED),
    _row("dp3", "bf16", nan(layer=0, rank=2), AGAIN),
    _row("dp3", "fp32", flip(layer=1, rank=2), CORRUPT, stability=WATCHED),
    _row("dp2-pp2", "bf16", nan(layer=3, rank=3), AGAIN),
    # All axes
    _row("2x2x2", "bf16", nan(layer=3, rank=5), AGAIN),
    _row("2x2x2", "bf16", nan(layer=1, rank=2, passes=2, steps=3), THRICE, stability=KEPT),
    _row("2x2x2", "fp16", overflow(layer=2, rank=6, steps=2), SCALED * 2),
    _row("2x2x2", "bf16", flip(layer=1, rank=3), CORRUPT, stability=WATCHED),
    _row("2x2x2", "bf16", noise(rank=1), ("spike_found", "rewound", "samples_skipped"), stability=REWINDS),
    _row("2x2x2-sp-zb", "bf16", nan(layer=2, rank=7), AGAIN),
)
