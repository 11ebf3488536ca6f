"""Closed forms of the pipeline schedules: how many micro-batches are alive, and how much of a step idles.

p stages, v chunks a stage, m micro-batches a step. Sources: 1F1B and interleaved 1F1B, Narayanan et al. 2021;
zero bubble, Qi et al. 2024 (the schedule of this name here is ZB-H1: the memory of 1F1B, weight gradients
fill the bubble).
"""

from __future__ import annotations

from functools import lru_cache


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
def split_layers(layers: int, parts: int) -> tuple[int, ...]:
    """Layers of each pipeline chunk, in order.

    Where `parts` does not divide them, the first and the last chunk, which also hold the embedding and the
    head, get
    fewer; any further remainder goes to the chunks in the middle.
    """
    share, rest = divmod(layers, parts)
    counts = [share] * parts
    order = [*range(1, parts - 1), 0, parts - 1] if parts > 2 else list(range(parts))
    for index in order[:rest]:
        counts[index] += 1
    return tuple(counts)


@lru_cache(maxsize=4096)
def stage_layer_counts(layers: int, stages: int, chunks: int) -> tuple[int, ...]:
    """Layers of each stage over all its chunks; chunk c lies on stage c mod p."""
    counts = split_layers(layers, stages * chunks)
    return tuple(sum(counts[stage::stages]) for stage in range(stages))
