"""Closed forms of the pipeline schedules: how many micro-batches are alive, and how much of a step idles.

p stages, v chunks a stage, m micro-batches a step. Sources: 1F1B and interleaved 1F1B, Narayanan et al. 2021;
zero bubble, Qi et al. 2024 (the schedule of this name here is ZB-H1: the memory of 1F1B, weight gradients
fill the bubble).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from math import ceil


def micro_batches_in_flight(schedule: str, stages: int, chunks: int, micro_batches: int, stage: int) -> float:
    """Micro-batches whose activations a stage holds at its peak, in units of all the stage's layers.

    Interleaved: min(m v, 2(p - i - 1) + (v - 1) p + 1) chunks are alive, each 1/v of the layers. Zero bubble:
    stage i begins with p - i micro-batches and puts the weight gradients of i others off, so all hold p.
    """
    if schedule == "zero-bubble":
        return min(micro_batches, stages)
    if schedule == "interleaved" and chunks > 1:
        warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
        return min(micro_batches * chunks, warm_up) / chunks
    return min(micro_batches, stages - stage)


def waiting_buffers(schedule: str, stages: int, chunks: int, stage: int) -> int:
    """Received activations and gradients that wait for their pass at a stage, at most: 1F1B receives one when
    it is due; the other schedules let the receives run ahead, by a round where a chunk's neighbour is the
    other end of the pipeline.
    """
    if stages == 1:
        return 0
    first, last = stage == 0, stage == stages - 1
    if schedule == "interleaved" or chunks > 1:
        return (stages if first else 2) + (stages if last else 2)
    forward = 1 if schedule == "zero-bubble" and not first else 0
    return forward + (not last)


def bubble_ratio(schedule: str, stages: int, chunks: int, micro_batches: int) -> float:
    """Idle share of the pipeline's time with equal stages: (p - 1) / (v m + p - 1).

    Zero bubble with forward, input-gradient and weight-gradient passes of equal length: (p - 1) / (3 v m + p
    - 1).
    """
    fill = stages - 1
    if schedule == "zero-bubble":
        return fill / (3 * chunks * micro_batches + fill)
    work = (chunks if schedule == "interleaved" else 1) * micro_batches
    return fill / (work + fill)


@lru_cache(maxsize=4096)
def split_layers(layers: int, stages: int, chunks: int = 1, head: float = 0.0) -> tuple[int, ...]:
    """Layers of each pipeline chunk, in order; chunk c lies on stage c mod p.

    Every chunk gets one. Each further layer goes to the stage that computes least so far, and there to the
    chunk that does; of equal ones, to those that hold neither the embedding nor the head. `head`: compute of
    the output head in layers.
    """
    parts = stages * chunks
    least = 1 if layers >= parts else 0
    loads = [float(least)] * (parts - 1) + [least + head]
    ends = [1] + [0] * (parts - 2) + [2] if parts > 1 else [0]
    stage_loads = [sum(loads[stage::stages]) for stage in range(stages)]
    stage_ends = [max(ends[stage::stages]) for stage in range(stages)]
    counts = [least] * parts
    for stage, more in enumerate(_deal(layers - least * parts, stage_loads, stage_ends)):
        for place, count in enumerate(_deal(more, loads[stage::stages], ends[stage::stages])):
            counts[stage + place * stages] += count
    return tuple(counts)


def _deal(layers: int, loads: Sequence[float], ends: Sequence[int]) -> list[int]:
    """How many layers each place gets when they go one by one to the least load; of equal ones to the least
    of `ends`, then to the first."""
    # So many each gets in any case: a place takes at most the loads' spread more than any other one.
    sure = max(0, layers // len(loads) - ceil(max(loads) - min(loads)))
    places = [(load + sure, ends[index], index) for index, load in enumerate(loads)]
    heapify(places)
    counts = [sure] * len(loads)
    for _ in range(layers - sure * len(loads)):
        load, end, index = places[0]
        counts[index] += 1
        heapreplace(places, (load + 1.0, end, index))
    return counts


@lru_cache(maxsize=4096)
def stage_layer_counts(layers: int, stages: int, chunks: int, head: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage over all its chunks."""
    counts = split_layers(layers, stages, chunks, head)
    return tuple(sum(counts[stage::stages]) for stage in range(stages))
