"""Do all replicas compute with the same weights? Checksums of compute weights and of the masters tell."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from llmtrain.engine.numerics.checksums import Checksums, Suspicion, convict
from llmtrain.engine.parallel.buckets import Bucket, Buckets
from llmtrain.engine.parallel.groups import Group

WORDS = {2: torch.int16, 4: torch.int32}
"""Integers as wide as a number of so many bytes: its bits."""


def compare_replicas(buckets: Buckets, dp: Group) -> tuple[Suspicion, ...]:
    """Compare the replicas of this rank's part of the model; all of the group must call it, between the
    arrival of new weights and the next update. A region of the result is a replica's share of all buckets.

    Weights that are gathered for every use (ZeRO-3) have no copy that could differ.
    """
    buckets.settle()
    held = torch.zeros(dp.size, dtype=torch.int64, device=buckets.buckets[0].master.device)
    owned = torch.zeros_like(held)
    for bucket in buckets.buckets:
        if not bucket.gathers:
            held += _checksums(bucket.parameters, dp.size)
            owned += _owned(bucket, dp)
    sharded = all(bucket.sharded for bucket in buckets.buckets) and dp.size > 1
    regions = [buckets.buckets[0].replicas.index] if sharded else range(dp.size)
    aliased = any(bucket.own.data_ptr() == bucket.master.data_ptr() for bucket in buckets.buckets)
    answer = {
        "held": held.tolist(),
        "owned": [[region, int(owned[region])] for region in regions],
        "independent": not aliased,
    }
    answers = dp.exchange(json.dumps(answer), held.device)
    return convict([_read(text) for text in answers])


def _read(text: str) -> Checksums:
    told = json.loads(text)
    return Checksums(held=tuple(told["held"]), owned=dict(told["owned"]), independent=told["independent"])


def _owned(bucket: Bucket, dp: Group) -> Tensor:
    """Checksums of what this replica's masters say, [dp]; zero for regions that it does not own."""
    rounded = bucket.master.to(bucket.parameters.dtype)
    if not bucket.sharded:
        return _checksums(rounded, dp.size)
    sums = torch.zeros(dp.size, dtype=torch.int64, device=rounded.device)
    sums[bucket.replicas.index] = _checksums(rounded, 1)[0]
    return sums


def _checksums(values: Tensor, regions: int) -> Tensor:
    """Sum of the words of each region, [regions]; any single flipped bit changes it."""
    words = values.view(WORDS[values.element_size()])
    share = -(-words.numel() // regions)
    parts = (words[region * share : (region + 1) * share] for region in range(regions))
    return torch.stack([part.sum(dtype=torch.int64) for part in parts])
