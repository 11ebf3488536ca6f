"""Which micro-batches a run may use, and with which one it begins and goes on. Pure.

`batch.micro: {min, max}` lets the engine grow and shrink the micro-batch inside the range; `auto` lets it
only shrink below the planned one, when memory is short. Either way the global batch and the order of samples
stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import MicroRange, Recipe
from llmtrain.run.memory_file import MemoryFile

FASTER = 0.98
"""Share of the time of a step that a larger micro-batch must get below to stay."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A micro-batch, and why it is not the planned one or the one before; empty when it is."""

    size: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """How many ranks say what about memory, and what rank 0 makes of the speed."""

    tight: float = 0.0
    """Ranks that are short of memory."""
    no_room: float = 0.0
    """Ranks that have no room for the next larger micro-batch."""
    larger: float = 0.0
    """Whether a larger one is worth a try."""
    back: float = 0.0
    """Whether the last growth did not pay."""


def choices(recipe: Recipe, layout: Layout) -> tuple[int, ...]:
    """Micro-batches that keep every global batch exactly under a layout, ascending; always with the layout's
    own one. A single one when the recipe fixes it."""
    wanted, planned = recipe.batch.micro, layout.micro_batch
    if isinstance(wanted, int) or recipe.batch.accumulation != "auto":
        return (planned,)
    low, high = (wanted.min, wanted.max) if isinstance(wanted, MicroRange) else (1, planned)
    sizes = recipe.batch.sizes
    return tuple(
        size
        for size in range(min(low, planned), max(high, planned) + 1)
        if size == planned or all(_keeps(layout, size, batch) for batch in sizes)
    )


def _keeps(layout: Layout, size: int, global_batch: int) -> bool:
    total, rest = divmod(global_batch, size)
    if rest or total < layout.dp:
        return False
    if layout.vpp == 1:
        return True
    share, extra = divmod(total, layout.dp)  # chunks are interleaved in whole rounds
    return not extra and share % layout.pp == 0


def may_grow(recipe: Recipe) -> bool:
    """Whether the engine may try larger micro-batches than the planned one."""
    return isinstance(recipe.batch.micro, MicroRange)


def first_choice(
    planned: Layout, sizes: Sequence[int], saved: Layout | None, failures: Iterable[tuple[int, MemoryFile]]
) -> Choice:
    """The micro-batch that an attempt begins with: the checkpoint's under the same layout, else the planned
    one, but smaller than any that ran out of memory."""
    wanted, reason = planned.micro_batch, ""
    if saved is not None and saved.micro_batch in sizes and _same(saved, planned) and saved != planned:
        wanted, reason = saved.micro_batch, "as in the checkpoint"
    for attempt, failure in failures:
        size = failure.layout.micro_batch
        if _same(failure.layout, planned) and size <= wanted:
            wanted = max((other for other in sizes if other < size), default=min(sizes))
            reason = f"rank {failure.rank} ran out of memory with {size} in attempt {attempt}"
    return Choice(wanted, reason)


def _same(one: Layout, other: Layout) -> bool:
    """Whether two layouts need the same memory for the same micro-batch, give or take ZeRO's shards."""
    keys = ("tp", "pp", "vpp", "cp", "ep", "sequence_parallel", "schedule", "recompute")
    return all(getattr(one, key) == getattr(other, key) for key in keys)


def next_choice(current: int, sizes: Sequence[int], votes: Votes) -> Choice:
    """The micro-batch from the next step on, the same on all ranks because the votes are."""
    smaller, larger = _neighbour(sizes, current, -1), _neighbour(sizes, current, 1)
    if votes.tight and smaller != current:
        return Choice(smaller, f"memory is short on {votes.tight:.0f} ranks")
    if votes.back and smaller != current:
        return Choice(smaller, f"{current} was not faster")
    if votes.larger and not votes.no_room and not votes.tight and larger != current:
        return Choice(larger, "there is memory for a larger one")
    return Choice(current)


def _neighbour(sizes: Sequence[int], current: int, distance: int) -> int:
    place = sizes.index(current) + distance
    return sizes[place] if 0 <= place < len(sizes) else current
