"""Small models, data and runs of the engine for its tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmtrain.config.data import DataConfig
from llmtrain.config.layout import Layout
from llmtrain.config.model import ModelConfig, RopeConfig
from llmtrain.config.numerics import ClipConfig, LearningRateConfig, OptimizerConfig, PrecisionConfig
from llmtrain.config.recipe import BatchConfig, Recipe, TrainConfig
from llmtrain.engine.build import Parts, build_parts
from llmtrain.engine.device import choose_device
from llmtrain.engine.state import state_pieces
from llmtrain.engine.step import Wishes, train_step, validate
from tests.support.ranks import run_ranks

SEQUENCE = 32
VOCAB = 96


def llama(**changes: Any) -> ModelConfig:
    """Four layers, grouped queries, RMSNorm, RoPE, SwiGLU."""
    shape = ModelConfig(
        kind="llama",
        layers=4,
        hidden=48,
        heads=4,
        kv_heads=2,
        head_dim=12,
        ffn_hidden=64,
        vocab=VOCAB,
        sequence=SEQUENCE,
        norm="rmsnorm",
        activation="swiglu",
        qkv_bias=False,
        bias=False,
        rope=RopeConfig(),
        tie_embeddings=False,
    )
    return replace(shape, **changes)


def gpt(**changes: Any) -> ModelConfig:
    """Four layers, LayerNorm, learned positions, biases, GELU, tied embeddings."""
    shape = ModelConfig(
        kind="gpt",
        layers=4,
        hidden=48,
        heads=4,
        kv_heads=4,
        head_dim=12,
        ffn_hidden=96,
        vocab=VOCAB,
        sequence=SEQUENCE,
        norm="layernorm",
        activation="gelu",
        qkv_bias=True,
        bias=True,
        rope=None,
        tie_embeddings=True,
    )
    return replace(shape, **changes)


def recipe(model: ModelConfig, *, mode: str = "fp32", global_batch: int = 8, steps: int = 20) -> Recipe:
    """A short training whose gradients are clipped now and then."""
    return Recipe(
        name="case",
        model=model,
        data=DataConfig(validation_every=10, validation_sequences=5),
        batch=BatchConfig(global_size=global_batch),
        precision=PrecisionConfig(mode=mode),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(),
        learning_rate=LearningRateConfig(peak=3e-3, warmup_steps=4),
        clip=ClipConfig(norm=1.0),
        train=TrainConfig(steps=steps, seed=7),
    )


class ZipfWindows:
    """Zipf-distributed tokens, the same for every reader; `pairs` makes every second one follow from the
    one before."""

    def __init__(self, tokens: int = 20_000, vocab: int = VOCAB, seed: int = 1, pairs: bool = True) -> None:
        generator = np.random.default_rng(seed)
        ranks = np.arange(1, vocab + 1)
        self._tokens = generator.choice(vocab, size=tokens, p=(1 / ranks) / (1 / ranks).sum()).astype(
            np.int64
        )
        if pairs:
            self._tokens[1::2] = (self._tokens[::2] * 5 + 3) % vocab

    def windows(self, sequence: int) -> int:
        """See `corpus/token_file.py`."""
        return (len(self._tokens) - 1) // sequence

    def window(self, index: int, sequence: int) -> np.ndarray:
        """See `corpus/token_file.py`."""
        return self._tokens[index * sequence : (index + 1) * sequence + 1]


@dataclass(frozen=True)
class Case:
    """One run of the engine."""

    recipe: Recipe
    layout: Layout = field(default_factory=Layout)
    ranks_per_node: int = 0
    """Which ranks share a node; 0: all are alike."""


@dataclass
class Outcome:
    """What a run did, as one rank saw it."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validation: float | None = None
    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    """Collectives of the last step, by axis and name."""
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes of the tensors of the last step's collectives, by axis and name."""


def build(case: Case, rank: int) -> Parts:
    """Build a case's parts and fill the weights from the seed."""
    parts = build_parts(
        case.recipe,
        case.layout,
        rank,
        choose_device(0, "cpu"),
        train=[ZipfWindows()],
        validation=[ZipfWindows(2_000, seed=2)],
        ranks_per_node=case.ranks_per_node,
    )
    parts.buckets.initialise(case.recipe.train.seed)
    return parts


def run_case(rank: int, case: Case) -> Outcome:
    """Train all steps of a case."""
    parts = build(case, rank)
    outcome = Outcome()
    for step in range(1, parts.steps + 1):
        for group in parts.groups.all():
            group.traffic.clear()
        result = train_step(parts, step, Wishes())
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
    parts.buckets.settle()
    outcome.calls = {group.axis: dict(group.traffic.calls) for group in parts.groups.all()}
    outcome.bytes = {group.axis: dict(group.traffic.bytes) for group in parts.groups.all()}
    found = validate(parts)
    outcome.validation = None if found is None else found.loss
    return outcome


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[Outcome]:
    """Train several cases one after the other in the same world."""
    torch.manual_seed(rank)
    return [run_case(rank, case) for case in cases]


def by_world_size(cases: Mapping[str, Case], folder: Path) -> Callable[[str], list[Outcome]]:
    """Name -> outcome of each rank; all cases of one world size share one launch, when the first is asked
    for."""

    @cache
    def world(size: int) -> dict[str, list[Outcome]]:
        names = [name for name, case in cases.items() if case.layout.world_size == size]
        results = run_ranks(run_cases, size, folder, [cases[name] for name in names])
        return {name: [outcomes[index] for outcomes in results] for index, name in enumerate(names)}

    return lambda name: world(cases[name].layout.world_size)[name]


def initial_weights(case: Case) -> dict[str, torch.Tensor]:
    """Every logical tensor of a case's model as the seed gives it, FP32, by name."""
    parts = build(replace(case, layout=Layout()), 0)
    return {
        piece.key.removesuffix("/master"): piece.data.clone().view(piece.box_shape)
        for piece in state_pieces(parts.buckets, parts.groups)
        if piece.key.endswith("/master")
    }
