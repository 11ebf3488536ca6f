"""One pipeline stage of the model: a run of blocks, with the embedding before the first and the head after
the last.

Shapes: s sequence, b micro-batch, h hidden, v vocabulary rows on this rank, n tensor-parallel degree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.config.model import ModelConfig
from llmtrain.engine.model.block import Block
from llmtrain.engine.model.documents import document_mask, rotary_table_at
from llmtrain.engine.model.norms import Norm
from llmtrain.engine.model.parameters import LogicalTensor, ModelParameter, ParameterSpec, parameters_of
from llmtrain.engine.model.rope import rotary_table
from llmtrain.engine.model.weights import Weights, WeightsInPlace
from llmtrain.engine.parallel.collectives import (
    TensorParallel,
    column_linear,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)

EMBEDDING = "embedding.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """Which part of the model a stage is."""

    index: int
    stages: int
    first_layer: int
    layers: int

    @property
    def is_first(self) -> bool:
        """Whether it holds the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it holds the head and computes the loss."""
        return self.index == self.stages - 1


class ModelStage(nn.Module):
    """Tokens [b, s] (first stage) or activations [s, b, h] -> activations [s, b, h]; `losses` turns the
    last stage's into the loss of each token."""

    def __init__(self, model: ModelConfig, place: StagePlace, tp: TensorParallel, recompute: str) -> None:
        super().__init__()
        self.model, self.place, self.tp = model, place, tp
        tied = bool(model.tie_embeddings)
        shared = tied and place.stages > 1
        self.embedding: ModelParameter | None = None
        self.positions: ModelParameter | None = None
        self.head: ModelParameter | None = None
        self.final_norm: Norm | None = None
        if place.is_first:
            self.embedding = vocabulary_matrix(model, EMBEDDING, tp, shared=shared)
            if model.rope is None:
                self.positions = _position_matrix(model, partial_over_tp=tp.sequence_parallel)
        layers = range(place.first_layer, place.first_layer + place.layers)
        self.blocks = nn.ModuleList(Block(model, layer, tp, recompute) for layer in layers)
        if place.is_last:
            self.final_norm = Norm(model, "final_norm", partial_over_tp=tp.sequence_parallel)
            if tied and self.embedding is not None:
                self.head = self.embedding
            else:
                self.head = vocabulary_matrix(model, EMBEDDING if tied else "head.weight", tp, shared=shared)
        self.first_row = vocabulary_rows(model.vocab, tp)[0]
        self.table: tuple[Tensor, Tensor] | None = None
        self.z_loss = 0.0
        """Weight of the squared log of the softmax's denominator in the training loss."""
        self.weights: Weights = WeightsInPlace()

    def sites(self) -> list[Sequence[ModelParameter]]:
        """The parameters of each place in the forward pass that needs some, in order: the embedding, every
        block, the last norm, the head. A tied embedding is in two of them."""
        found: list[Sequence[ModelParameter]] = []
        if self.embedding is not None:
            found.append([self.embedding] if self.positions is None else [self.embedding, self.positions])
        found += [parameters_of([block]) for block in self.blocks]
        if self.final_norm is not None and self.head is not None:
            found += [parameters_of([self.final_norm]), [self.head]]
        return found

    def place_tables(self, device: torch.device) -> None:
        """Compute what is neither trained nor saved, on the device."""
        if self.model.rope is not None:
            self.table = rotary_table(
                self.model.rope, int(self.model.head_dim or 0), self.model.sequence, device
            )

    def forward(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """Tokens [b, s] on the first stage, else [s, b, h] ([s/n, b, h] under sequence parallelism) -> the
        latter. `positions` [b, s] are places in documents, between which no token attends; None: places in
        the sequence, which is all one document."""
        hidden, site, table, mask = inputs, 0, self.table, None
        if positions is not None:
            mask = document_mask(positions)
            table = None if table is None else rotary_table_at(table, positions)
        if self.place.is_first:
            hidden, site = self.weights.use(0, partial(self._embed, positions), inputs), 1
        for block in self.blocks:
            work = partial(block, table=table, mask=mask)
            hidden, site = self.weights.use(site, work, hidden), site + 1
        return hidden if self.final_norm is None else self.weights.use(site, self.final_norm, hidden)

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """[s, b, h], targets [b, s] -> cross-entropy of each token, [s, b] in FP32; 0 where the target is
        negative: nothing is predicted there. Last stage only."""
        site = self.place.is_first + len(self.blocks) + 1
        return self.weights.use(site, partial(self._losses, targets), hidden)

    def _losses(self, targets: Tensor, hidden: Tensor) -> Tensor:
        if self.head is None:
            raise RuntimeError(f"stage {self.place.index} of {self.place.stages} has no head")
        logits = column_linear(hidden, self.head, None, self.tp)
        z_loss = self.z_loss if self.training else 0.0
        flat = vocabulary_cross_entropy(
            logits.flatten(0, 1), targets.t().flatten(), self.first_row, self.tp, z_loss
        )
        return flat.view(logits.shape[:2]).masked_fill(targets.t() < 0, 0.0)

    def _embed(self, positions: Tensor | None, tokens: Tensor) -> Tensor:
        if self.embedding is None:
            raise RuntimeError("only the first stage embeds tokens")
        hidden = vocabulary_embedding(tokens.t(), self.embedding, self.first_row, self.tp)
        if self.positions is None:
            return hidden
        own = slice(None)
        if self.tp.sequence_parallel:
            share = self.model.sequence // self.tp.size
            own = slice(self.tp.index * share, (self.tp.index + 1) * share)
        if positions is not None:
            return hidden + F.embedding(positions.t()[own], self.positions)
        return hidden + self.positions[own].unsqueeze(1)


def vocabulary_rows(vocab: int, tp: TensorParallel) -> tuple[int, int]:
    """First vocabulary row of this rank, and how many it holds: equal shares, rounded up to 8 rows where
    all ranks still get some, the last one shorter."""
    share = -(-vocab // tp.size)
    rounded = -(-share // 8) * 8
    if rounded * (tp.size - 1) < vocab:
        share = rounded
    first = min(tp.index * share, vocab)
    return first, min(share, vocab - first)


def vocabulary_matrix(model: ModelConfig, name: str, tp: TensorParallel, *, shared: bool) -> ModelParameter:
    """The embedding or the head, [v, h]."""
    first, rows = vocabulary_rows(model.vocab, tp)
    piece = LogicalTensor(
        name=name, shape=(model.vocab, model.hidden), split=0, start=first, length=rows, std=model.init_std
    )
    return ModelParameter(ParameterSpec(pieces=(piece,), decay=True, shared_over_pp=shared))


def _position_matrix(model: ModelConfig, *, partial_over_tp: bool) -> ModelParameter:
    piece = LogicalTensor(name="positions.weight", shape=(model.sequence, model.hidden), std=model.init_std)
    return ModelParameter(ParameterSpec(pieces=(piece,), decay=True, partial_over_tp=partial_over_tp))
