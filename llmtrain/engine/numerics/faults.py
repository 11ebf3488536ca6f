"""Faults made on purpose, for rehearsals: only what the recipe's `faults.inject` lists, and each is told.

A fault acts where a real one would: in a block's output, in its gradient, in the tokens, in the compute
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.config.numerics import InjectedFault
from llmtrain.engine.data import Batch
from llmtrain.engine.model.stage import ModelStage
from llmtrain.engine.numerics.layer_names import block_name, layer_of
from llmtrain.engine.numerics.replicas import WORDS
from llmtrain.engine.parallel.buckets import Buckets
from llmtrain.engine.parallel.groups import Groups

EXPONENT_BIT = {2: 1 << 14, 4: 1 << 30}
"""Highest bit of the exponent, by bytes of the format: small numbers become huge ones."""


class InjectedFaults:
    """The recipe's faults, as one rank meets them."""

    def __init__(
        self,
        faults: Sequence[InjectedFault],
        stages: Sequence[ModelStage],
        buckets: Buckets,
        groups: Groups,
        vocab: int,
    ) -> None:
        self._faults, self._buckets, self._groups, self._vocab = tuple(faults), buckets, groups, vocab
        self._step = self._pass = 0
        self._hit: set[InjectedFault] = set()
        layers = {fault.layer for fault in faults if fault.rank == groups.rank}
        for stage in stages if layers else ():
            for layer, block in enumerate(stage.blocks, stage.place.first_layer):
                if layer in layers:
                    block.register_forward_hook(self._in_block(layer))

    def begin_step(self, step: int) -> tuple[InjectedFault, ...]:
        """A step begins; return the faults that are due in it, on any rank."""
        self._step, self._pass = step, 0
        due = self._due()
        for fault in due:
            if fault.kind == "bit_flip" and fault.rank == self._groups.rank:
                self._flip(fault)
        return due

    def begin_pass(self) -> None:
        """A pass of the step begins."""
        self._pass += 1
        self._hit.clear()

    def spoil(self, batch: Batch) -> Batch:
        """What the replica reads: noise for a bad batch."""
        for fault in self._due():
            dims, place = self._groups.dims, self._groups.place
            if fault.kind == "bad_batch" and dims.coordinate(fault.rank % dims.world_size).dp == place.dp:
                generator = torch.Generator().manual_seed(self._step)
                noise = torch.randint(self._vocab, (2, *batch.tokens.shape), generator=generator)
                tokens, targets = noise.to(batch.tokens.device)
                return replace(batch, tokens=tokens, targets=targets)
        return batch

    def _due(self) -> tuple[InjectedFault, ...]:
        return tuple(
            fault
            for fault in self._faults
            if fault.step <= self._step < fault.step + fault.steps and self._pass <= fault.passes
        )

    def _in_block(self, layer: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            for fault in self._due():
                mine = fault.rank == self._groups.rank and fault.layer == layer
                is_wide = fault.kind == "overflow" and getattr(module, "dtype", None) is not None
                if mine and module.training and not is_wide and fault not in self._hit:
                    self._hit.add(fault)  # the first micro-batch of a pass
                    output = _spoilt(fault.kind, output)
            return output

        return hook

    def _flip(self, fault: InjectedFault) -> None:
        """Flip a bit of the layer's first compute weight on this rank, where weights are kept."""
        self._buckets.settle()
        for bucket in self._buckets.buckets:
            for slot in bucket.slots:
                if (
                    layer_of(slot.parameter.spec.pieces[0].name) == block_name(fault.layer)
                    and not bucket.gathers
                ):
                    size = bucket.parameters.element_size()
                    word = bucket.parameters[slot.start : slot.start + 1].view(WORDS[size])
                    word.bitwise_xor_(EXPONENT_BIT[size])
                    return


def _spoilt(kind: str, output: Tensor) -> Tensor:
    if kind == "nan":
        return output + torch.full_like(output, torch.nan)
    if kind == "overflow" and output.requires_grad:
        # The identity, whose gradient is infinite as after an overflow of FP16.
        output = output.view_as(output)
        output.register_hook(lambda gradient: gradient + torch.inf)
    return output
