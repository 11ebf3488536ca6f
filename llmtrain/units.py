"""Quantities as people write them: bytes, bandwidths, durations, counts, FLOP/s; parse and print.

A parser takes text or a plain number in the base unit (bytes, bytes/s, seconds, units, FLOP/s) and raises
ValueError with a sentence for people. `B` is a byte and `b` a bit, always; `k M G T P` are powers of 1000 and
`Ki Mi Gi Ti Pi` of 1024.
"""

from __future__ import annotations

import math
import re

Quantity = str | int | float


class UnitError(ValueError):
    """The number is fine, its unit is not; the message says which units are."""


_NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,3})?|\.[0-9]+(?:[eE][-+]?[0-9]{1,3})?)"
_MEASURE = re.compile(rf"{_NUMBER}\s*(?P<unit>[A-Za-z/]*)")
_CLOCK = re.compile(
    r"(?:(?P<days>[0-9]{1,6})-)?(?P<hours>[0-9]{1,8}):(?P<minutes>[0-5][0-9]):(?P<seconds>[0-5][0-9])"
)
_SPAN = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?\s*[A-Za-z]+\s*)+")
_SPAN_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)")

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", start=1)}
_PREFIX = _DECIMAL | _BINARY
_COUNT = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
}


def parse_bytes(value: Quantity) -> int:
    """Bytes of `80 GB`, `512 MiB` or a plain number of bytes; raises ValueError."""
    number, unit = _measure(value, "a size such as `80 GB` or `512 MiB`")
    if unit.endswith(("b", "bit")):
        raise UnitError(f"`{value}` is in bits; sizes are in bytes (`B`), e.g. `80 GB`")
    prefix = unit.removesuffix("B")
    if unit == "" or (unit.endswith("B") and prefix in _PREFIX):
        return round(_finite(number * _PREFIX.get(prefix, 1.0), value))
    raise UnitError(f"unknown unit `{unit}` in `{value}`; use B, kB, MB, GB, TB or KiB, MiB, GiB, TiB")


def parse_bandwidth(value: Quantity) -> float:
    """Bytes/s of `50 GB/s`, `400 Gb/s`, `400 Gbps` or a plain number of bytes/s; raises ValueError."""
    number, unit = _measure(value, "a bandwidth such as `50 GB/s` or `400 Gb/s`")
    if unit == "":
        return number
    per_second = re.fullmatch(r"(?P<amount>[A-Za-z]+?)(?:/s|ps)", unit)
    if per_second is None:
        raise UnitError(
            f"unknown unit `{unit}` in `{value}`; a bandwidth is per second, e.g. `50 GB/s` or `400 Gb/s`"
        )
    amount = per_second["amount"].replace("bit", "b")
    prefix = amount[:-1]
    if amount[-1:] not in {"b", "B"} or prefix not in _PREFIX:
        raise UnitError(f"unknown unit `{unit}` in `{value}`; use GB/s (bytes) or Gb/s (bits)")
    return _finite(number * _PREFIX[prefix] / (8.0 if amount[-1] == "b" else 1.0), value)


def parse_duration(value: Quantity) -> float:
    """Seconds of `30m`, `1h 30m`, `5us`, the clock forms `24:00:00` and `1-12:00:00`, or a plain number.

    Raises ValueError.
    """
    expected = "a duration such as `90s`, `30m`, `1h 30m` or `24:00:00`"
    if not isinstance(value, str):
        return _plain(value, expected)
    text = value.strip()
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if ":" in text:
        raise UnitError(f"`{value}` is no clock time; it is hours:minutes:seconds")
    if _SPAN.fullmatch(text):
        return _finite(sum(_seconds(number, unit, value) for number, unit in _SPAN_PART.findall(text)), value)
    return _measure_without_unit(value, expected)


def parse_count(value: Quantity) -> int:
    """Whole number of `15T`, `300B`, `1.5M`, `3e11` or a plain whole number; raises ValueError."""
    expected = "a whole number, or one such as `1.5M`, `300B` or `3e11`"
    number, unit = _measure(value, expected)
    if unit not in _COUNT:
        raise UnitError(f"unknown suffix `{unit}` in `{value}`; use k, M, B or T")
    if isinstance(value, int):
        return value
    exact = _finite(number * _COUNT[unit], value)
    if exact != round(exact):
        raise ValueError(f"`{value}` is not {expected}")
    return round(exact)


def parse_flops(value: Quantity) -> float:
    """FLOP/s of `312 TFLOP/s`, `1 PFLOPS` or a plain number; raises ValueError."""
    number, unit = _measure(value, "a rate such as `312 TFLOP/s`")
    match = re.fullmatch(r"(?P<prefix>[kKMGTPE]?)(?:FLOP/s|FLOPS|FLOPs|flops)", unit)
    if unit and match is None:
        raise UnitError(f"unknown unit `{unit}` in `{value}`; use e.g. TFLOP/s")
    return _finite(number * _DECIMAL[match["prefix"] if match else ""], value)


def format_bytes(number: float) -> str:
    """`80.0 GB`; powers of 1000."""
    return _scaled(number, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def format_bandwidth(bytes_per_second: float) -> str:
    """`50.0 GB/s`; powers of 1000."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_count(number: float) -> str:
    """`175.2 B`, `1.3 M`, `512`; the suffixes that `parse_count` takes."""
    return _scaled(number, ("", "k", "M", "B", "T")).rstrip()


def format_flops(flops_per_second: float) -> str:
    """`312.0 TFLOP/s`."""
    return _scaled(
        flops_per_second, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s", "EFLOP/s")
    )


def format_duration(seconds: float) -> str:
    """`12.3 ms`, `1.53 s`, `2 min 05 s`, `3 h 07 min`, `4 d 02 h`: two figures that matter."""
    if seconds <= 0:
        return f"-{format_duration(-seconds)}" if seconds else "0 s"
    for scale, unit, limit in ((1e-6, "us", 1000), (1e-3, "ms", 1000), (1.0, "s", 60)):
        figures = float(f"{seconds / scale:.3g}")
        if figures < limit:
            return f"{figures:g} {unit}"
    for ceiling, large, large_name, small, small_name in (
        (3600, 60, "min", 1, "s"),
        (86400, 3600, "h", 60, "min"),
        (math.inf, 86400, "d", 3600, "h"),
    ):
        rounded = round(seconds / small) * small
        if rounded < ceiling:
            return f"{rounded // large:.0f} {large_name} {rounded % large // small:02.0f} {small_name}"
    return f"{seconds} s"


DAY = 86400.0
"""Seconds."""


def percent(ratio: float) -> str:
    """`9.1 %` of 0.091."""
    return f"{100 * ratio:.1f} %"


def plural(count: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _scaled(number: float, units: tuple[str, ...]) -> str:
    """Number with the largest unit that leaves at least 1; whole below the first step."""
    scaled, index = float(number), 0
    while abs(scaled) >= 999.95 and index < len(units) - 1:
        scaled, index = scaled / 1000, index + 1
    digits = f"{scaled:.1f}" if index or scaled != round(scaled) else f"{scaled:.0f}"
    return f"{digits} {units[index]}"


def _measure(value: Quantity, expected: str) -> tuple[float, str]:
    """Split a quantity into number and unit."""
    if not isinstance(value, str):
        return _plain(value, expected), ""
    match = _MEASURE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"`{value}` is not {expected}")
    return _finite(float(match["number"]), value), match["unit"]


def _measure_without_unit(value: str, expected: str) -> float:
    """A number as text, without unit."""
    match = re.fullmatch(_NUMBER, value.strip())
    if match is None:
        raise ValueError(f"`{value}` is not {expected}")
    return _finite(float(match["number"]), value)


def _plain(value: float, expected: str) -> float:
    """A plain number, refused when it is a boolean, negative or not finite."""
    if isinstance(value, bool) or not value >= 0:  # NaN is not
        raise ValueError(f"`{str(value).lower()}` is not {expected}")
    try:
        return _finite(float(value), value)
    except OverflowError:
        raise ValueError("the number is too large") from None


def _seconds(number: str, unit: str, value: str) -> float:
    """Seconds of one part of a duration."""
    if unit not in _SECONDS:
        raise UnitError(f"unknown unit `{unit}` in `{value}`; use us, ms, s, m, h or d")
    return float(number) * _SECONDS[unit]


def _finite(number: float, value: Quantity) -> float:
    """The number, or ValueError when it overflowed."""
    if not math.isfinite(number):
        raise ValueError(f"`{value}` is too large")
    return number
