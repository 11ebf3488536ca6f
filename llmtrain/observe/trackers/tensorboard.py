"""A run as TensorBoard event files, written without TensorBoard: TFRecords around three small messages.

One folder holds one run over all its attempts. When an attempt restored an older step, a session-start record
tells TensorBoard to forget the points from there on, so that replayed steps do not show twice.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from llmtrain.events.event import Event
from llmtrain.events.schema import Evaluated, Restored, StepFinished
from llmtrain.observe.trackers.scalars import scalars

VERSION = "brain.Event:2"
"""First record of every file (tensorflow/core/util/event.proto, file_version)."""
SESSION_START = 1
CRC_POLYNOMIAL = 0x82F63B78
"""CRC-32C (Castagnoli), reflected."""
MASK_DELTA = 0xA282EAD8


def records(events: Iterable[Event]) -> Iterator[bytes]:
    """TFRecords of a run's events, in their order; the file's version record is not among them."""
    for event in events:
        match event.payload:
            case StepFinished() as step:
                yield record(_summary(event.time, step.step, scalars(step)))
            case Evaluated(step=number, loss=loss):
                yield record(_summary(event.time, number, {"validation/loss": loss}))
            case Restored(step=number) if event.attempt > 1:
                start = _varint_field(1, SESSION_START)
                yield record(_event(event.time, number + 1) + _bytes_field(7, start))


def file_head(time: float) -> bytes:
    """What stands at the start of every event file."""
    return record(_double_field(1, time) + _bytes_field(3, VERSION.encode()))


def record(data: bytes) -> bytes:
    """A TFRecord: length, its checksum, the data, its checksum."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked_crc(length)) + data + struct.pack("<I", _masked_crc(data))


def _summary(time: float, step: int, scalars: dict[str, float]) -> bytes:
    """Event with a Summary of scalars (tag 1, simple_value 2)."""
    values = (_bytes_field(1, tag.encode()) + _float_field(2, value) for tag, value in scalars.items())
    return _event(time, step) + _bytes_field(5, b"".join(_bytes_field(1, value) for value in values))


def _event(time: float, step: int) -> bytes:
    """Fields wall_time (1) and step (2) of an Event."""
    return _double_field(1, time) + _varint_field(2, step)


# ---- the wire format of protocol buffers: a key of field number and type before every value
def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _double_field(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _float_field(number: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(number << 3 | 5) + packed


# ---- checksums
def _crc_table() -> Sequence[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (CRC_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _crc_table()


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF
