"""Arithmetic on pieces of tensors: a piece is a range of the row-major flattening of a box of the global
tensor.

The box is a tensor-parallel slice, the range a ZeRO shard, which may cut a row anywhere. Every range is at
most 2n - 1 axis-aligned sub-boxes of its n-dimensional box, so that two pieces of unrelated layouts meet in
few strided copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SubBox:
    """An axis-aligned part of a tensor: `start` in global coordinates, `shape`, and where it lies inside the
    piece."""

    start: Shape
    shape: Shape
    offset: int
    """Elements from the beginning of the piece's data to the sub-box's first element."""
    strides: Shape
    """Strides, in elements, of the box that the piece was cut from."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """What two pieces share: one strided copy of `shape` elements."""

    shape: Shape
    source_offset: int
    source_strides: Shape
    target_offset: int
    target_strides: Shape

    @property
    def numel(self) -> int:
        """Number of elements copied."""
        return prod(self.shape)


def row_major_strides(shape: Sequence[int]) -> Shape:
    """Strides, in elements, of a contiguous tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def sub_boxes(box_start: Shape, box_shape: Shape, flat_start: int, numel: int) -> Iterator[SubBox]:
    """Cut elements [flat_start, flat_start + numel) of a box into sub-boxes, in order.

    Raises ValueError when the range is not inside the box.
    """
    if flat_start < 0 or numel < 0 or flat_start + numel > prod(box_shape):
        raise ValueError(
            f"elements {flat_start}..{flat_start + numel} are not inside a box of shape {box_shape}"
        )
    strides = row_major_strides(box_shape)
    position, end = flat_start, flat_start + numel
    while position < end:
        shape = _largest_block(box_shape, strides, position, end)
        index = tuple(position // stride % size for stride, size in zip(strides, box_shape, strict=True))
        start = tuple(base + step for base, step in zip(box_start, index, strict=True))
        yield SubBox(start, shape, position - flat_start, strides)
        position += prod(shape)


def _largest_block(box_shape: Shape, strides: Shape, position: int, end: int) -> Shape:
    """Shape of the largest sub-box that begins at `position`, is contiguous in the box and ends at or before
    `end`."""
    for axis, stride in enumerate(strides):
        if position % stride == 0 and end - position >= stride:
            room = box_shape[axis] - position // stride % box_shape[axis]
            count = min((end - position) // stride, room)
            return (1,) * axis + (count, *box_shape[axis + 1 :])
    return ()


def overlap(source: SubBox, target: SubBox) -> Overlap | None:
    """Return what two sub-boxes of the same tensor share, or None."""
    shape: list[int] = []
    source_offset, target_offset = source.offset, target.offset
    for axis, (first, second) in enumerate(zip(source.start, target.start, strict=True)):
        low = max(first, second)
        length = min(first + source.shape[axis], second + target.shape[axis]) - low
        if length <= 0:
            return None
        shape.append(length)
        source_offset += (low - first) * source.strides[axis]
        target_offset += (low - second) * target.strides[axis]
    return Overlap(tuple(shape), source_offset, source.strides, target_offset, target.strides)


def boxes_intersect(first: tuple[Shape, Shape], second: tuple[Shape, Shape]) -> bool:
    """Whether two boxes, each (start, shape), share an element."""
    return all(
        max(a, b) < min(a + m, b + n)
        for a, m, b, n in zip(first[0], first[1], second[0], second[1], strict=True)
    )


def cover_fault(shape: Shape, pieces: Sequence[tuple[Shape, Shape, int, int]]) -> str:
    """Say why pieces (box start, box shape, flat start, numel) do not cover a tensor exactly once; "" when
    they do.

    Boxes must be equal or disjoint, which every tensor-parallel split is; linear in the pieces of one box.
    """
    by_box: dict[tuple[Shape, Shape], list[tuple[int, int]]] = defaultdict(list)
    for box_start, box_shape, flat_start, numel in pieces:
        if numel:
            by_box[(box_start, box_shape)].append((flat_start, numel))
    boxes = list(by_box)
    for number, box in enumerate(boxes):
        for other in boxes[:number]:
            if boxes_intersect(box, other):
                return f"boxes {_box_text(other)} and {_box_text(box)} overlap"
    for box, ranges in by_box.items():
        position = 0
        for flat_start, numel in sorted(ranges):
            if flat_start != position:
                fault = "missing" if flat_start > position else "stored twice"
                low, high = sorted((position, flat_start))
                return f"elements {low}..{high} of box {_box_text(box)} are {fault}"
            position += numel
        if position != prod(box[1]):
            return f"elements {position}..{prod(box[1])} of box {_box_text(box)} are missing"
    covered = sum(prod(box[1]) for box in boxes)
    if covered != prod(shape):
        return f"{prod(shape) - covered} of {prod(shape)} elements are missing"
    return ""


def _box_text(box: tuple[Shape, Shape]) -> str:
    start, shape = box
    return "[" + ", ".join(f"{low}:{low + size}" for low, size in zip(start, shape, strict=True)) + "]"
