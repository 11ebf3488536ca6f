"""Charts in text."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmtrain.observe.terminal_views.chart import line_chart, resample, sparkline

numbers = st.lists(st.floats(-1e300, 1e300) | st.sampled_from([math.nan, math.inf]), max_size=200)


@given(values=numbers, width=st.integers(1, 120), height=st.integers(1, 10), unicode=st.booleans())
@example(values=[2.263386074958446e18] * 3, width=1, height=2, unicode=False)  # their mean is larger
def test_charts_keep_to_their_space(values, width, height, unicode) -> None:
    lines = line_chart(values, width, height, unicode=unicode)
    assert len(lines) in (0, height)
    assert bool(lines) == any(map(math.isfinite, values))
    assert all(len(line) <= max(width, 14) for line in lines)
    assert len(sparkline(values, width, unicode=unicode)) <= width
    if not unicode:
        assert all(line.isascii() for line in [*lines, sparkline(values, width, unicode=False)])


def test_a_falling_loss_falls_from_the_top_left_to_the_bottom_right() -> None:
    assert line_chart([4, 3, 2, 1], 10, 4, unicode=False) == [
        "4 **",
        "    **",
        "      **",
        "1       **",
    ]


def test_sparkline_of_few_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20, unicode=False) == "_.-=+*#@"
    assert sparkline([1, math.nan, 2], 20, unicode=False) == "_ @"
    assert sparkline([math.nan], 20) == ""


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_resample_is_the_mean_of_equal_parts(width) -> None:
    values = [float(value) for value in range(21)]
    means = resample(values, width)
    assert len(means) == width
    assert sum(mean or 0 for mean in means) / width == pytest.approx(10, abs=0.5)
