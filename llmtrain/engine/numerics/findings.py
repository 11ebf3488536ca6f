"""What ranks find out about a step's numbers together: where they went wrong, whether replicas differ, what
the gradients look like. Every exchange here happens rarely, and on all ranks alike."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import Tensor

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from llmtrain.engine.model.stage import ModelStage
from llmtrain.engine.numerics.layer_names import layer_names
from llmtrain.engine.numerics.measure import LayerGradient, measure
from llmtrain.engine.numerics.origin import Origin, OutputProbe, first_of, report
from llmtrain.engine.numerics.replicas import compare_replicas
from llmtrain.engine.parallel.buckets import Buckets
from llmtrain.engine.parallel.groups import Groups
from llmtrain.events.reactions import CorruptionFound


class Findings:
    """One rank's part in them."""

    def __init__(
        self, recipe: Recipe, layout: Layout, stages: Sequence[ModelStage], buckets: Buckets, groups: Groups
    ) -> None:
        self._recipe, self._layout, self._buckets, self._groups = recipe, layout, buckets, groups
        self._layers = layer_names(recipe.model.layers)
        self._probe = OutputProbe(stages)
        self._differing: list[tuple[list[int], str]] = []

    def begin_pass(self, layout: Layout) -> None:
        """A pass of the step begins, in a layout whose micro-batch may be another than before."""
        self._layout = layout
        self._probe.begin()

    def locate(self, step: int, loss: Tensor | None) -> Origin:
        """Where the pass that has just ended went wrong first. `loss` is this rank's own, or None."""
        told = self._exchange(report(self._probe, loss, self._buckets, self._layers))
        layer, rank, micro_batch = first_of(told, self._layers)
        if micro_batch is None:
            return Origin(layer=layer, rank=rank)
        batch, replica = self._recipe.batch, self._groups.dims.coordinate(rank).dp
        first = batch.samples_before(step) + self._layout.first_sample(replica, batch.at(step))
        size = self._layout.micro_batch
        return Origin(layer=layer, rank=rank, first_sample=first + micro_batch * size, samples=size)

    def replicas_differ(self, step: int) -> bool:
        """Whether this rank's replicas compute with different weights; looked at every few steps, by all
        ranks, after the weights have arrived and before they change."""
        every = self._recipe.stability.corruption.every
        self._differing = []
        if every and step % every == 0:
            dp = self._groups.dp
            for suspicion in compare_replicas(self._buckets, dp):
                self._differing.append(([dp.ranks[member] for member in suspicion.members], suspicion.part))
        return bool(self._differing)

    def corruption(self, step: int) -> list[CorruptionFound]:
        """What all ranks' comparisons found, each thing once."""
        told = self._exchange(json.dumps(self._differing))
        unique = sorted({(tuple(ranks), part) for text in told for ranks, part in json.loads(text)})
        action = self._recipe.stability.corruption.action
        return [CorruptionFound(step=step, ranks=ranks, part=part, action=action) for ranks, part in unique]

    def measure(self, step: int, scale: float) -> tuple[LayerGradient, ...]:
        """What the gradients of all layers look like, when it is time to look, else nothing."""
        every = self._recipe.stability.monitor.every
        if not every or step % every:
            return ()
        return measure(self._buckets, self._groups.world, self._layers, scale)

    def _exchange(self, text: str) -> Sequence[str]:
        return self._groups.world.exchange(text, self._buckets.buckets[0].master.device)
