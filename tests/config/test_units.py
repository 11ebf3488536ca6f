"""Quantities: what is read, what is refused, and that printing and parsing agree."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain import units


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "80 GB", 80e9),
        (units.parse_bytes, "80GB", 80e9),
        (units.parse_bytes, "512 MiB", 512 * 2**20),
        (units.parse_bytes, "1.5 TB", 1.5e12),
        (units.parse_bytes, "12 B", 12),
        (units.parse_bytes, "3 kB", 3000),
        (units.parse_bytes, 12, 12),
        (units.parse_bandwidth, "50 GB/s", 50e9),
        (units.parse_bandwidth, "400 Gb/s", 50e9),
        (units.parse_bandwidth, "400 Gbit/s", 50e9),
        (units.parse_bandwidth, "400 Gbps", 50e9),
        (units.parse_bandwidth, "1 GiB/s", 2**30),
        (units.parse_bandwidth, 1e9, 1e9),
        (units.parse_duration, "90s", 90),
        (units.parse_duration, "30m", 1800),
        (units.parse_duration, "30 min", 1800),
        (units.parse_duration, "1h 30m", 5400),
        (units.parse_duration, "1h30m", 5400),
        (units.parse_duration, "2d", 172800),
        (units.parse_duration, "5us", 5e-6),
        (units.parse_duration, "1.5 ms", 1.5e-3),
        (units.parse_duration, "24:00:00", 86400),
        (units.parse_duration, "01:30:00", 5400),
        (units.parse_duration, "1-12:00:00", 129600),
        (units.parse_duration, "60", 60),
        (units.parse_duration, 0, 0),
        (units.parse_count, "15T", 15 * 10**12),
        (units.parse_count, "300B", 300 * 10**9),
        (units.parse_count, "1.5M", 1_500_000),
        (units.parse_count, "3e11", 3 * 10**11),
        (units.parse_count, 2**60 + 1, 2**60 + 1),
        (units.parse_flops, "312 TFLOP/s", 312e12),
        (units.parse_flops, "1 PFLOPS", 1e15),
    ],
)
def test_read(parse, text, value) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (units.parse_bytes, "80 Gb", "in bits"),
        (units.parse_bytes, "80 gb", "in bits"),
        (units.parse_bytes, "80 GX", "unknown unit `GX`"),
        (units.parse_bytes, "", "is not a size"),
        (units.parse_bytes, "GB", "is not a size"),
        (units.parse_bytes, "-1 GB", "is not a size"),
        (units.parse_bytes, True, "is not a size"),
        (units.parse_bytes, math.inf, "too large"),
        (units.parse_bytes, "9e999 GB", "too large"),
        (units.parse_bytes, "9e300 EB", "too large"),
        (units.parse_bandwidth, "50 GB", "per second"),
        (units.parse_bandwidth, "50 gb/s", "GB/s (bytes) or Gb/s (bits)"),
        (units.parse_bandwidth, "50 /s", "per second"),
        (units.parse_duration, "24:00", "hours:minutes:seconds"),
        (units.parse_duration, "24:60:00", "hours:minutes:seconds"),
        (units.parse_duration, "30 lightyears", "unknown unit `lightyears`"),
        (units.parse_duration, -1, "is not a duration"),
        (units.parse_duration, 10**400, "too large"),
        (units.parse_count, "2.5", "is not a whole number"),
        (units.parse_count, "10Q", "unknown suffix `Q`"),
        (units.parse_count, math.nan, "is not a whole number"),
        (units.parse_flops, "312 TFLOP", "unknown unit `TFLOP`"),
    ],
)
def test_refused(parse, text, words) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(text)


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (units.format_bytes, 0, "0 B"),
        (units.format_bytes, 999, "999 B"),
        (units.format_bytes, 80e9, "80.0 GB"),
        (units.format_bytes, 999_960, "1.0 MB"),
        (units.format_bandwidth, 50e9, "50.0 GB/s"),
        (units.format_count, 256, "256"),
        (units.format_count, 174.6e9, "174.6 B"),
        (units.format_flops, 312e12, "312.0 TFLOP/s"),
        (units.format_duration, 0, "0 s"),
        (units.format_duration, 5e-6, "5 us"),
        (units.format_duration, 0.0123, "12.3 ms"),
        (units.format_duration, 0.9996, "1 s"),
        (units.format_duration, 1.53, "1.53 s"),
        (units.format_duration, 59.97, "1 min 00 s"),
        (units.format_duration, 125, "2 min 05 s"),
        (units.format_duration, 3599.7, "1 h 00 min"),
        (units.format_duration, 11220, "3 h 07 min"),
        (units.format_duration, 352800, "4 d 02 h"),
        (units.format_duration, -5, "-5 s"),
    ],
)
def test_shown(show, value, text) -> None:
    assert show(value) == text


@given(st.floats(min_value=0, max_value=1e18))
def test_printed_bytes_are_read_back(value: float) -> None:
    assert units.parse_bytes(units.format_bytes(value)) == pytest.approx(value, rel=0.06, abs=1)


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_printed_durations_are_read_back(value: float) -> None:
    assert units.parse_duration(units.format_duration(value)) == pytest.approx(value, rel=0.05)


@given(st.one_of(st.text(max_size=30), st.integers(), st.floats(), st.booleans()))
def test_no_parser_raises_anything_but_value_error(value) -> None:
    for parse in (
        units.parse_bytes,
        units.parse_bandwidth,
        units.parse_duration,
        units.parse_count,
        units.parse_flops,
    ):
        try:
            parsed = parse(value)
        except ValueError:
            continue
        assert parsed >= 0
        assert math.isfinite(parsed)
