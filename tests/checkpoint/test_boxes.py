"""The arithmetic of pieces, against numpy indexing element by element."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.run.checkpoints.boxes import cover_fault, overlap, row_major_strides, sub_boxes

Shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    """(start, shape) of a box inside a shape."""
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(draw(st.integers(1, size - low)) for low, size in zip(start, shape, strict=True))
    return start, extent


@st.composite
def pieces(draw, shape):
    """(box start, box shape, flat start, numel) of a piece of a tensor."""
    start, extent = draw(boxes(shape))
    low = draw(st.integers(0, prod(extent)))
    return start, extent, low, draw(st.integers(0, prod(extent) - low))


def elements(shape, piece):
    """Flat global indices of a piece's elements, in the order of its data."""
    start, extent, low, count = piece
    whole = np.arange(prod(shape)).reshape(shape)
    box = whole[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))]
    return box.reshape(-1)[low : low + count]


@given(Shapes.flatmap(lambda shape: st.tuples(st.just(shape), pieces(shape))))
def test_sub_boxes_partition_the_range_in_order(case):
    shape, piece = case
    parts = list(sub_boxes(*piece))
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    whole = np.arange(prod(shape)).reshape(shape)
    found = [
        whole[tuple(slice(a, a + n) for a, n in zip(p.start, p.shape, strict=True))].reshape(-1)
        for p in parts
    ]
    joined = np.concatenate(found) if found else np.zeros(0, int)
    assert joined.tolist() == elements(shape, piece).tolist()
    offsets = [part.offset for part in parts]
    assert offsets == np.cumsum([0] + [prod(part.shape) for part in parts])[:-1].tolist()


@settings(max_examples=300)
@given(Shapes.flatmap(lambda shape: st.tuples(st.just(shape), pieces(shape), pieces(shape))))
def test_overlaps_copy_exactly_the_shared_elements(case):
    shape, source, target = case
    data = elements(shape, source)
    filled = np.full(target[3], -1)
    for first in sub_boxes(*source):
        for second in sub_boxes(*target):
            shared = overlap(first, second)
            if shared is None:
                continue
            for index in np.ndindex(*shared.shape):
                place = shared.target_offset + int(np.dot(index, shared.target_strides))
                assert filled[place] == -1, "copied twice"
                filled[place] = data[shared.source_offset + int(np.dot(index, shared.source_strides))]
    wanted = elements(shape, target)
    available = set(data.tolist())
    assert filled.tolist() == [value if value in available else -1 for value in wanted.tolist()]


def test_ranges_outside_the_box_are_refused():
    with pytest.raises(ValueError, match=r"elements 5\.\.13 are not inside a box of shape \(3, 4\)"):
        list(sub_boxes((0, 0), (3, 4), 5, 8))


@pytest.mark.parametrize(
    ("pieces_", "fault"),
    [
        ([((0, 0), (4, 6), 0, 24)], ""),
        ([((0, 0), (4, 3), 0, 5), ((0, 0), (4, 3), 5, 7), ((0, 3), (4, 3), 0, 12)], ""),
        ([((0, 0), (4, 3), 0, 12)], "12 of 24 elements are missing"),
        ([], "24 of 24 elements are missing"),
        (
            [((0, 0), (4, 6), 0, 10), ((0, 0), (4, 6), 11, 13)],
            "elements 10..11 of box [0:4, 0:6] are missing",
        ),
        (
            [((0, 0), (4, 6), 0, 10), ((0, 0), (4, 6), 8, 16)],
            "elements 8..10 of box [0:4, 0:6] are stored twice",
        ),
        ([((0, 0), (4, 6), 0, 20)], "elements 20..24 of box [0:4, 0:6] are missing"),
        ([((0, 0), (4, 4), 0, 16), ((0, 3), (4, 3), 0, 12)], "boxes [0:4, 0:4] and [0:4, 3:6] overlap"),
        (
            [((0, 0), (4, 6), 0, 24), ((0, 0), (4, 6), 0, 24)],
            "elements 0..24 of box [0:4, 0:6] are stored twice",
        ),
    ],
)
def test_cover_faults_are_named(pieces_, fault):
    assert cover_fault((4, 6), pieces_) == fault


def test_strides_of_a_scalar_and_a_matrix():
    assert row_major_strides(()) == ()
    assert row_major_strides((2, 3, 4)) == (12, 4, 1)
