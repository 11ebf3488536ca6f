"""Which parameters of a rank go into which flat bucket: the engine lays its memory out by it, and the planner
counts bytes on the wire by it.

Pure arithmetic on sizes. Buckets come in the order in which the backward pass fills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["plain", "partial", "shared"]

BLOCK = 128
"""Elements that share one scale in 8-bit gradients: 1 + 4/128 bytes an element, 25.8 % of FP32."""

BUCKETS_AT_ONCE = 3
"""Buckets whose whole gradients exist at once where ZeRO keeps shards of them: one is filled, two travel."""

SHARE_ON_THE_WIRE = {"fp32": 1.0, "bf16": 0.5, "fp16": 0.5, "int8": (1.0 + 4.0 / BLOCK) / 4.0}
"""Bytes of a gradient in each format, as a share of FP32."""


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """What packing needs to know about one parameter of a rank."""

    numel: int
    kind: Kind
    """`partial`: each tensor-parallel rank sees a part of the gradient; `shared`: the two ends of the
    pipeline hold the same tensor; `plain`: neither."""
    is_vector: bool
    """Norms and biases: too small to be worth gathering."""
    chunk: int
    """Pipeline chunk of the rank."""
    site: int
    """Place of its first use in the forward pass: the embedding, a block, the head."""


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """Some parameters that travel together."""

    members: tuple[int, ...]
    """Positions in the given sequence, in the order of the backward pass."""
    kind: Kind
    chunk: int
    releases: bool
    """Gradients are reduced in every micro-batch and only the shard is kept (ZeRO-2 and 3)."""
    gathers: bool
    """Parameters are gathered before each use and given back after it (ZeRO-3)."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a rank packs."""

    zero: int
    """ZeRO stage; 0 where there is one replica only."""
    bucket_bytes: int
    """FP32 gradient bytes that a bucket aims at; a larger parameter gets a bucket of its own."""

    def pack(self, shapes: Sequence[ParameterShape]) -> list[PackedBucket]:
        """Pack the parameters, given in forward order.

        Parameters whose gradients are also summed over another group get buckets of their own, which come
        last: they become ready last. So do vectors under ZeRO-3, which every replica keeps whole.
        """
        plain: list[list[int]] = []
        whole: list[int] = []
        partial: list[int] = []
        shared: list[int] = []
        size, cut = 0, (-1, -1)
        for index in reversed(range(len(shapes))):
            shape = shapes[index]
            if shape.kind == "shared":
                shared.append(index)
            elif shape.kind == "partial":
                partial.append(index)
            elif self.zero >= 3 and shape.is_vector:
                whole.append(index)
            else:
                if not plain or size + 4 * shape.numel > self.bucket_bytes or self._cut(shape) != cut:
                    plain.append([])
                    size, cut = 0, self._cut(shape)
                plain[-1].append(index)
                size += 4 * shape.numel
        found = [self._bucket(shapes, members, "plain") for members in plain]
        # A tensor that both ends hold is large (the embedding); the partial ones are norms.
        found += [self._bucket(shapes, [index], "shared") for index in shared]
        if whole:
            found.append(PackedBucket(tuple(whole), "plain", 0, releases=False, gathers=False))
        if partial:
            found.append(PackedBucket(tuple(partial), "partial", 0, releases=False, gathers=False))
        return found

    def _cut(self, shape: ParameterShape) -> tuple[int, int]:
        """A bucket holds one chunk's parameters from ZeRO-2 on, one use's from ZeRO-3 on."""
        return (shape.chunk if self.zero >= 2 else 0, shape.site if self.zero >= 3 else 0)

    def _bucket(self, shapes: Sequence[ParameterShape], members: list[int], kind: Kind) -> PackedBucket:
        return PackedBucket(
            tuple(members),
            kind,
            shapes[members[0]].chunk,
            releases=self.zero >= 2,
            gathers=self.zero >= 3,
        )


def default_bucket_bytes(*, on_cpu: bool) -> int:
    """FP32 bytes of a gradient bucket: large enough for full link speed, small enough to overlap."""
    return (16 if on_cpu else 256) << 20


def shard_elements(elements: int, parts: int, communication: str) -> int:
    """Elements of a bucket that one of `parts` replicas keeps; the last shards are padded with zeros."""
    shard = -(-elements // parts)
    return -(-shard // BLOCK) * BLOCK if communication == "int8" and parts > 1 else shard


def encoded_bytes(elements: int, communication: str) -> int:
    """Bytes that a shard of FP32 gradients takes on the wire."""
    if communication == "int8":
        return elements + 4 * (elements // BLOCK)
    return elements * (4 if communication == "fp32" else 2)
