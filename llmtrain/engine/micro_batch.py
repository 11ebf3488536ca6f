"""The micro-batch in force: grown and shrunk by measured memory and speed, in agreement with all ranks.

All changes happen between two steps and on all ranks at once. A rank that runs out of memory inside a step
cannot tell the others, which wait for it in some collective: alone in its world it does the step again with a
smaller micro-batch; in a larger world it dies and leaves a note, and the next attempt begins with a smaller
one (`plan/micro_batch.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

import torch

from llmtrain.config.codec import from_json, to_json
from llmtrain.config.layout import Layout
from llmtrain.engine.build import Parts
from llmtrain.engine.device import Device
from llmtrain.engine.failures import error_class
from llmtrain.errors import LlmtrainError
from llmtrain.events.schema import MicroBatchChanged, Payload
from llmtrain.plan.micro_batch import FASTER, Choice, Votes, choices, first_choice, may_grow, next_choice
from llmtrain.run.layout import RunDir
from llmtrain.run.memory_file import read_memory_files

LOOK_EVERY = 5
"""Steps between two looks at memory and speed; the first step after a change is slow, and counts for no
pace."""
TIGHT, ROOMY = 0.96, 0.88
"""Shares of a device's memory: above the first a smaller micro-batch is wanted, and a larger one must stay
below the second."""

STATE = "micro_batch"
"""Key of the layout in force in a checkpoint's named state."""


class Meter(Protocol):
    """Memory of this rank's device."""

    capacity: int
    """Bytes that this rank may use."""

    def peak(self) -> int:
        """Most bytes in use since the last call."""
        ...

    def is_thrashing(self) -> bool:
        """Whether the allocator had to give memory back and try again since the last call."""
        ...


@dataclass(slots=True)
class DeviceMeter:
    """The real one."""

    device: Device
    capacity: int
    _retries: int = 0

    def peak(self) -> int:
        """See `Meter.peak`."""
        found = self.device.peak_memory_in_use()
        self.device.forget_peak_memory()
        return found

    def is_thrashing(self) -> bool:
        """See `Meter.is_thrashing`."""
        before, self._retries = self._retries, self.device.allocation_retries()
        return self._retries > before


class MicroBatchControl:
    """One rank's part in choosing the micro-batch."""

    def __init__(self, parts: Parts, emit: Callable[[Payload], None], meter: Meter) -> None:
        self._parts, self._emit, self._meter = parts, emit, meter
        self._sizes = choices(parts.recipe, parts.layout)
        self._grows = may_grow(parts.recipe)
        self._states = _state_bytes(parts)
        self._seconds: deque[float] = deque(maxlen=LOOK_EVERY - 1)
        self._pace_before: float | None = None
        """Seconds of a step before the last growth, while that growth is on trial."""
        self._steps = 0

    @property
    def is_free(self) -> bool:
        """Whether there is anything to choose."""
        return len(self._sizes) > 1

    def begin(self, run: RunDir, extra: dict[str, Any], step: int) -> None:
        """Take the micro-batch that an attempt begins with, on all ranks the same. `extra` is the
        checkpoint's named state."""
        if not self.is_free:
            return
        world, device = self._parts.groups.world, self._parts.device.torch_device
        planned, sizes = self._parts.layout, self._sizes
        choice, largest = Choice(planned.micro_batch), sizes[-1]
        if world.index == 0:
            failures = read_memory_files(run)
            choice = first_choice(planned, sizes, _saved_layout(extra), failures)
            # What ran out of memory once is not grown into again, however much room there seems to be.
            largest = first_choice(replace(planned, micro_batch=largest), sizes, None, failures).size
        size, largest = map(int, world.exchange(f"{choice.size} {largest}", device)[0].split())
        self._sizes = tuple(one for one in sizes if one <= max(size, largest))
        self._use(Choice(size, choice.reason), step)
        extra[STATE] = to_json(self._parts.layout)

    def after_step(self, step: int, seconds: float, extra: dict[str, Any]) -> None:
        """Look at memory and speed now and then, and change the micro-batch if all agree."""
        if not self.is_free:
            return
        self._steps += 1
        if self._steps > 1:
            self._seconds.append(seconds)
        if self._steps % LOOK_EVERY:
            return
        choice = next_choice(self._parts.layout.micro_batch, self._sizes, self._agree(self._vote()))
        self._use(choice, step)
        extra[STATE] = to_json(self._parts.layout)

    def shrinks_after(self, error: Exception, step: int) -> bool:
        """Whether a step that ran out of memory can be done again by this rank, which must be alone, with a
        smaller micro-batch, which is then in force. Only before the weights began to change."""
        alone = self._parts.groups.world.size == 1
        if not (alone and self.is_free and error_class(error) == "out_of_memory"):
            return False
        current = self._parts.layout.micro_batch
        if self._parts.passes.clock.has_ended("agree") or current == self._sizes[0]:
            return False
        self._sizes = tuple(size for size in self._sizes if size < current)
        self._use(Choice(self._sizes[-1], f"out of memory with {current}"), step - 1)
        for bucket in self._parts.buckets.buckets:  # what the step that failed left behind
            for slot in bucket.slots:
                slot.parameter.grad = None
        self._parts.device.release_cached_memory()
        return True

    def _vote(self) -> Votes:
        current, first = self._parts.layout.micro_batch, self._parts.groups.world.index == 0
        peak, capacity = self._meter.peak(), self._meter.capacity
        place = self._sizes.index(current)
        larger = self._sizes[min(place + 1, len(self._sizes) - 1)]
        needed = self._states + (peak - self._states) * larger / current
        pace = median(self._seconds)
        failed = self._pace_before is not None and pace > FASTER * self._pace_before
        self._pace_before = None
        self._grows = self._grows and not failed  # Once a growth did not pay, no further one is tried.
        return Votes(
            tight=float(peak > TIGHT * capacity or self._meter.is_thrashing()),
            no_room=float(needed > ROOMY * capacity),
            larger=float(first and self._grows and larger != current),
            back=float(first and failed),
        )

    def _agree(self, votes: Votes) -> Votes:
        device = self._parts.device.torch_device
        numbers = torch.tensor(
            [votes.tight, votes.no_room, votes.larger, votes.back], dtype=torch.float64, device=device
        )
        tight, no_room, larger, back = self._parts.groups.world.all_reduce(numbers).tolist()
        return Votes(tight=tight, no_room=no_room, larger=larger, back=back)

    def _use(self, choice: Choice, step: int) -> None:
        before = self._parts.layout.micro_batch
        if choice.size == before:
            return
        pace = median(self._seconds) if self._seconds else None
        self._pace_before = pace if choice.size > before else None
        self._seconds.clear()
        self._steps = 0
        self._parts.use_micro_batch(choice.size)
        if self._parts.groups.rank == 0:
            changed = MicroBatchChanged(
                step=step + 1, micro_batch=choice.size, before=before, reason=choice.reason
            )
            self._emit(changed)


def _state_bytes(parts: Parts) -> int:
    """Bytes that no micro-batch changes: parameters, gradients, optimizer."""
    storages = {}
    for bucket in parts.buckets.buckets:
        moments = (bucket.master, bucket.exp_avg, bucket.exp_avg_sq)
        kept = (bucket.parameters, bucket.gradients, bucket.own, bucket.reduced, *moments, *bucket.errors)
        for tensor in kept:
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _saved_layout(extra: dict[str, Any]) -> Layout | None:
    found = extra.get(STATE)
    if not isinstance(found, dict):
        return None
    try:
        return from_json(Layout, found)
    except LlmtrainError:  # of a version that had other keys
        return None
