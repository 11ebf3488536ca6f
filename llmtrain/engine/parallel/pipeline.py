"""Forward and backward passes of one replica's micro-batches, with or without a pipeline, and the pass for
validation.

The schedules are those of `torch.distributed.pipelining`; the stages are given with static shapes, so that
nothing is inferred at run time. Shapes: m micro-batches, b micro-batch, s sequence, h hidden, n
tensor-parallel degree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from llmtrain.config.layout import Layout
from llmtrain.config.model import ModelConfig
from llmtrain.engine.clock import Clock
from llmtrain.engine.device import Device
from llmtrain.engine.model.stage import ModelStage, StagePlace
from llmtrain.engine.parallel.collectives import TensorParallel
from llmtrain.engine.parallel.groups import Groups
from llmtrain.engine.parallel.timed_stage import TimedStage
from llmtrain.engine.parallel.zero_bubble import ZeroBubble
from llmtrain.plan.model_size import head_layers
from llmtrain.plan.timing.schedules import split_layers


class Passes(Protocol):
    """How one rank takes part in a step."""

    clock: Clock

    def use_micro_batch(self, size: int) -> None:
        """From the next step on, micro-batches have another size."""
        ...

    def in_format(self, dtype: torch.dtype) -> Passes:
        """The same passes, whose stages hand each other activations of another format."""
        ...

    def train(
        self, tokens: Tensor, targets: Tensor, scale: float, positions: Tensor | None = None
    ) -> Tensor | None:
        """Tokens and targets [m b, s] forward and backward; return the sum over micro-batches of `scale` x
        mean loss, detached, on the last stage. `positions` [m b, s] are places in documents, where these
        count."""
        ...

    def evaluate(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor | None:
        """Tokens and targets [m b, s] forward only; return the summed token losses of each sequence, [m b]
        in FP64, on the last stage."""
        ...


class SinglePass:
    """The whole model in one stage."""

    def __init__(self, stage: ModelStage, micro_batch: int, device: Device) -> None:
        self.clock = Clock(device)
        self._stage, self._micro_batch = stage, micro_batch

    def use_micro_batch(self, size: int) -> None:
        """See `Passes.use_micro_batch`."""
        self._micro_batch = size

    def in_format(self, dtype: torch.dtype) -> Passes:
        """See `Passes.in_format`; one stage hands nothing on."""
        return self

    def train(
        self, tokens: Tensor, targets: Tensor, scale: float, positions: Tensor | None = None
    ) -> Tensor | None:
        """See `Passes.train`."""
        total = torch.zeros((), device=tokens.device)
        for index, batch in enumerate(_split(tokens, targets, positions, self._micro_batch)):
            loss = self.clock.run("forward", 0, index, partial(self._loss, *batch, scale))
            total += loss.detach()
            self.clock.run("backward", 0, index, loss.backward)
        return total

    def _loss(self, inputs: Tensor, goals: Tensor, places: Tensor | None, scale: float) -> Tensor:
        return self._stage.losses(self._stage(inputs, places), goals).mean() * scale

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor | None:
        """See `Passes.evaluate`."""
        batches = _split(tokens, targets, positions, self._micro_batch)
        return torch.cat(
            [
                _sequence_losses(self._stage, self._stage(inputs, places), goals)
                for inputs, goals, places in batches
            ]
        )


def _split(
    tokens: Tensor, targets: Tensor, positions: Tensor | None, size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Micro-batches of [m b, s]: tokens, targets and positions."""
    places = repeat(None) if positions is None else iter(positions.split(size))
    for inputs, goals in zip(tokens.split(size), targets.split(size), strict=True):
        yield inputs, goals, next(places)


class PipelinePass:
    """This rank's stages of a pipeline. A schedule is made when a number of micro-batches is first met."""

    def __init__(
        self,
        stages: Sequence[ModelStage],
        groups: Groups,
        layout: Layout,
        *,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        self.clock = Clock(device)
        self._losses = 0
        self._stages, self._groups, self._layout = stages, groups, layout
        self._dtype, self._device = dtype, device
        self._scale = 1.0
        self._last = next((stage for stage in stages if stage.place.is_last), None)
        self._schedules: dict[int, Any] = {}
        self._in_other_formats: dict[torch.dtype, PipelinePass] = {}

    def use_micro_batch(self, size: int) -> None:
        """See `Passes.use_micro_batch`."""
        self._layout = replace(self._layout, micro_batch=size)
        self._schedules.clear()
        self._in_other_formats.clear()

    def in_format(self, dtype: torch.dtype) -> Passes:
        """See `Passes.in_format`."""
        if dtype == self._dtype:
            return self
        found = self._in_other_formats.get(dtype)
        if found is None:
            found = PipelinePass(self._stages, self._groups, self._layout, dtype=dtype, device=self._device)
            self._in_other_formats[dtype] = found
        found.clock = self.clock
        return found

    def _schedule(self, micro_batches: int) -> Any:
        found = self._schedules.get(micro_batches)
        if found is None:
            stages = [self._pipeline_stage(stage) for stage in self._stages]
            found = _make_schedule(stages, self._layout, micro_batches, self._loss)
            self._schedules[micro_batches] = found
        return found

    def _pipeline_stage(self, stage: ModelStage) -> TimedStage:
        shape = (self._layout.micro_batch, stage.model.sequence)
        tokens = torch.empty(shape, dtype=torch.int64, device=self._device.torch_device)
        activation = self.new_activation().requires_grad_()
        put_off = stage.tp.put_off
        made = TimedStage(
            stage,
            stage.place.index,
            stage.place.stages,
            self._device.torch_device,
            input_args=tokens if stage.place.is_first else activation,
            output_args=activation,
            group=self._groups.pp.handle,
            dw_builder=None if put_off is None else put_off.take,
        )
        made.passes = self
        return made

    def count_sent(self, operations: list[Any]) -> list[Any]:
        """See `StageOwner.count_sent`."""
        for operation in operations:
            self._groups.pp.traffic.add("send", operation.tensor)
        return operations

    def new_activation(self) -> Tensor:
        """Room for what one stage hands to another, [s, b, h], or [s/n, b, h] under sequence parallelism."""
        model, tp = self._stages[0].model, self._stages[0].tp
        rows = model.sequence // (tp.size if tp.sequence_parallel else 1)
        shape = (rows, self._layout.micro_batch, model.hidden)
        return torch.empty(shape, dtype=self._dtype, device=self._device.torch_device)

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if self._last is None:
            raise RuntimeError("a rank without the last stage was asked for a loss")
        last, index = self._last, self._losses
        self._losses += 1  # The last stage's forward passes, and so its losses, come in order.
        return self.clock.run(
            "loss", last.place.index, index, lambda: last.losses(hidden, targets).mean() * self._scale
        )

    def train(
        self, tokens: Tensor, targets: Tensor, scale: float, positions: Tensor | None = None
    ) -> Tensor | None:
        """See `Passes.train`."""
        self._scale, self._losses = scale, 0
        losses: list[Tensor] = []
        inputs = (tokens,) if self._stages[0].place.is_first else ()
        places = {} if positions is None else {"positions": positions}
        schedule = self._schedule(len(tokens) // self._layout.micro_batch)
        if self._last is None:
            schedule.step(*inputs, **places, return_outputs=False)
            return None
        schedule.step(*inputs, **places, target=targets, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum()

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor | None:
        """See `Passes.evaluate`. Nothing is kept for a backward pass."""
        results: list[Tensor] = []
        sending: list[tuple[Any, Tensor]] = []
        received = self.new_activation()
        batches = list(_split(tokens, targets, positions, self._layout.micro_batch))
        for chunk, micro_batch in evaluation_order(len(self._stages), len(batches), self._layout.pp):
            stage, (inputs, goals, places) = self._stages[chunk], batches[micro_batch]
            if not stage.place.is_first:
                dist.recv(received, self._neighbour(stage.place, -1), group=self._groups.pp.handle)
            hidden = stage(inputs if stage.place.is_first else received, places)
            if stage.place.is_last:
                results.append(_sequence_losses(stage, hidden, goals))
            else:
                hidden = hidden.contiguous()
                work = dist.isend(hidden, self._neighbour(stage.place, 1), group=self._groups.pp.handle)
                sending.append((work, hidden))
        for work, _ in sending:
            work.wait()
        return torch.cat(results) if results else None

    def _neighbour(self, place: StagePlace, distance: int) -> int:
        """Rank that holds the stage before or after."""
        return self._groups.pp.ranks[(place.index + distance) % self._groups.pp.size]


def evaluation_order(chunks: int, micro_batches: int, pp: int) -> Iterator[tuple[int, int]]:
    """Forward passes of a rank in order, as chunk and micro-batch: each chunk in turn for as many
    micro-batches as half the ranks.

    NCCL does a group's messages one after the other, and a large one is not over before the other side takes
    it. With more micro-batches at a time, the first rank would still be sending for its first chunk when the
    last one sends for the next, and all would wait in a ring.
    """
    width = max(1, pp // 2)
    for first in range(0, micro_batches, width):
        for chunk in range(chunks):
            for micro_batch in range(first, min(first + width, micro_batches)):
                yield chunk, micro_batch


def _sequence_losses(stage: ModelStage, hidden: Tensor, targets: Tensor) -> Tensor:
    return stage.losses(hidden, targets).double().sum(0)


def _make_schedule(
    stages: list[Any], layout: Layout, micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """The layout's schedule; scaling and summing gradients is the buckets' business, hence
    scale_grads=False."""
    if layout.schedule == "zero-bubble" and layout.vpp == 1:
        return ZeroBubble(stages[0], micro_batches, loss)
    if layout.schedule == "zero-bubble":
        return ScheduleInterleavedZeroBubble(stages, micro_batches, loss, scale_grads=False)
    if layout.vpp > 1:
        return ScheduleInterleaved1F1B(stages, micro_batches, loss, scale_grads=False)
    if micro_batches < layout.pp:
        # Too few to keep every stage busy: 1F1B is then all warm-up and cool-down, which is what GPipe's
        # order does.
        return ScheduleGPipe(stages[0], micro_batches, loss, scale_grads=False)
    return Schedule1F1B(stages[0], micro_batches, loss, scale_grads=False)


def stage_places(model: ModelConfig, layout: Layout, pp_index: int) -> Iterator[StagePlace]:
    """The stages of a pipeline rank: every pp-th one, from its own index on."""
    stages = layout.pp * layout.vpp
    counts = split_layers(model.layers, layout.pp, layout.vpp, head_layers(model, layout.recompute))
    for index in range(pp_index, stages, layout.pp):
        yield StagePlace(index=index, stages=stages, first_layer=sum(counts[:index]), layers=counts[index])


def build_stages(model: ModelConfig, layout: Layout, groups: Groups) -> list[ModelStage]:
    """This rank's stages, without storage."""
    return [
        ModelStage(model, place, TensorParallel(groups.tp, layout.sequence_parallel), layout.recompute)
        for place in stage_places(model, layout, groups.place.pp)
    ]
