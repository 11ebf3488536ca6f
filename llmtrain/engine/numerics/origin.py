"""Where numbers went wrong first: layer, rank and samples.

A hook keeps one number of every block's output: its sum, which is finite only if all of it is. Nobody looks
at these until a step has failed; what then is left to find out is told in one exchange.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.engine.model.stage import ModelStage
from llmtrain.engine.numerics.layer_names import HEAD, block_name, layer_of
from llmtrain.engine.parallel.buckets import Buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The first place where numbers were not finite, as far as it is known."""

    layer: str = ""
    rank: int | None = None
    first_sample: int | None = None
    """First sample of the micro-batch; None: unknown."""
    samples: int = 0

    def words(self) -> str:
        """For a person, e.g. `layers.3 on rank 5, samples 16..17`."""
        where = self.layer or "nowhere in particular"
        where += "" if self.rank is None else f" on rank {self.rank}"
        if self.first_sample is None:
            return where
        return f"{where}, samples {self.first_sample}..{self.first_sample + self.samples - 1}"


class OutputProbe:
    """The sum of every block's output in the pass under way."""

    def __init__(self, stages: Sequence[ModelStage]) -> None:
        self._sums: dict[int, list[Tensor]] = {}
        for stage in stages:
            for layer, block in enumerate(stage.blocks, stage.place.first_layer):
                self._sums[layer] = []
                block.register_forward_hook(self._keep(layer))

    def _keep(self, layer: int) -> Any:
        sums = self._sums[layer]

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if module.training:
                sums.append(output.detach().sum(dtype=torch.float32))

        return hook

    def begin(self) -> None:
        """A pass begins."""
        for sums in self._sums.values():
            sums.clear()

    def first(self) -> tuple[int, int] | None:
        """The first layer of this rank whose output was not finite, and in which micro-batch."""
        for layer, sums in sorted(self._sums.items()):
            if sums:
                wrong = torch.stack(sums).isfinite().logical_not().nonzero()
                if wrong.numel():
                    return layer, int(wrong[0])
        return None


def last_gradient(buckets: Buckets, layers: Sequence[str]) -> str:
    """The layer nearest to the loss, on this rank, that got a gradient that is not finite; "" for none. Its
    own sum is looked at where it is kept, else the one over the replicas."""
    found = [layers.index(layer) for layer in _layers_of_bad_gradients(buckets)]
    return layers[max(found)] if found else ""


def _layers_of_bad_gradients(buckets: Buckets) -> Iterator[str]:
    for bucket in buckets.buckets:
        flat, first = bucket.gradients, 0
        if flat is None:
            flat, first = bucket.reduced, bucket.first
        for slot in bucket.slots:
            low, high = max(slot.start - first, 0), min(slot.stop - first, flat.numel())
            if low < high and not bool(flat[low:high].isfinite().all()):
                yield layer_of(slot.parameter.spec.pieces[0].name)


def first_of(reports: Sequence[str], layers: Sequence[str]) -> tuple[str, int, int | None]:
    """From every rank's report to layer, rank and micro-batch: the first output in forward order, or else the
    loss itself, or else the gradient nearest to it. Pure."""
    told = list(enumerate(json.loads(report) for report in reports))
    outputs = [(one["output"][0], rank, one["output"][1]) for rank, one in told if one["output"]]
    if outputs:
        layer, rank, micro_batch = min(outputs)
        return block_name(layer), rank, micro_batch
    losses = [rank for rank, one in told if one["loss"]]
    if losses:
        return HEAD, losses[0], None
    gradients = [(-layers.index(one["gradient"]), rank) for rank, one in told if one["gradient"]]
    if gradients:
        place, rank = min(gradients)
        return layers[-place], rank, None
    return "", 0, None


def report(probe: OutputProbe, loss: Tensor | None, buckets: Buckets, layers: Sequence[str]) -> str:
    """What this rank knows about a pass whose numbers are not finite."""
    bad_loss = loss is not None and not bool(loss.isfinite().all())
    return json.dumps({"output": probe.first(), "loss": bad_loss, "gradient": last_gradient(buckets, layers)})
