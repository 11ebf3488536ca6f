"""One line, one event: every kind round-trips, and no bytes can make the reader raise."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.events.event import LINE_LIMIT, decode_line, encode_line, payload_classes
from llmtrain.events.moments import describe
from llmtrain.events.reactions import SpikeFound
from llmtrain.events.schema import AttemptEnded, Notice, StepFinished
from llmtrain.events.state import fold
from llmtrain.events.watching import NodeChanged
from llmtrain.events.words import NodeStatus
from tests.support.sample_events import event, events, step_finished


def test_kinds_are_unique_words() -> None:
    kinds = payload_classes()
    assert len(kinds) >= 18
    assert all(kind.isidentifier() and kind.islower() for kind in kinds)


@given(events())
def test_every_event_round_trips(original) -> None:
    line = encode_line(original)
    assert line.count(b"\n") == 1 and line.endswith(b"\n") and line.isascii()
    back = decode_line(line)
    assert back is not None
    assert back.payload == original.payload
    assert back.time == pytest.approx(original.time, abs=1e-6)
    assert (back.attempt, back.source, back.rank, back.seq) == (
        original.attempt,
        original.source,
        original.rank,
        original.seq,
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_stay_strict_json(loss) -> None:
    line = encode_line(event(step_finished(3, loss=loss), rank=0))
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    back = decode_line(line)
    assert back is not None and isinstance(back.payload, StepFinished)
    assert back.payload.loss == loss or (math.isnan(loss) and math.isnan(back.payload.loss))


def test_unknown_fields_are_left_out_and_unknown_kinds_skipped() -> None:
    raw = json.loads(encode_line(event(Notice(message="hello"))))
    newer = {**raw, "extra": 1, "data": {**raw["data"], "colour": "red"}}
    back = decode_line(json.dumps(newer).encode())
    assert back is not None and back.payload == Notice(message="hello")
    assert decode_line(json.dumps({**raw, "kind": "from_the_future"}).encode()) is None


def test_words_of_another_version_are_read_and_told() -> None:
    words = (
        Notice(message="hello", level="loud"),
        NodeChanged(node="n1", state="asleep"),
        AttemptEnded(outcome="merged"),
        SpikeFound(step=1, quantity="perplexity", value=9.0, median=1.0, deviation=0.1, action="celebrate"),
    )
    for payload in words:
        back = decode_line(encode_line(event(payload)))
        assert back is not None and back.payload == payload
        assert describe(back) is not None
    fold(event(payload) for payload in words)
    said = dataclasses.replace(event(words[0]), source="a person")
    assert decode_line(encode_line(said)) == said


def test_known_words_are_plain_strings_in_a_file() -> None:
    line = encode_line(event(NodeChanged(node="n1", state=NodeStatus.LOST)))
    assert b'"state":"lost"' in line
    assert decode_line(line).payload.state is NodeStatus.LOST


@pytest.mark.parametrize(
    "change",
    [
        {"time": "nan"},
        {"time": True},
        {"attempt": 1.5},
        {"attempt": 10**30},
        {"rank": "0"},
        {"data": []},
        {"data": {}},
        {"data": {"message": 7}},
        {"kind": ["notice"]},
        {"run": None},
        {"v": None},
    ],
)
def test_wrong_types_are_skipped(change) -> None:
    raw = json.loads(encode_line(event(Notice(message="hello"))))
    assert decode_line(json.dumps({**raw, **change}).encode()) is None


@given(st.binary(max_size=200))
def test_no_bytes_raise(line) -> None:
    decode_line(line)


@given(events(), st.data())
def test_no_cut_or_flipped_line_raises(original, data) -> None:
    line = bytearray(encode_line(original))
    place = data.draw(st.integers(0, len(line) - 1))
    decode_line(bytes(line[:place]))
    line[place] = data.draw(st.integers(0, 255))
    decode_line(bytes(line))


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b"9" * 100_000, b'{"kind":' * 20_000, b"x" * (LINE_LIMIT + 1)]
)
def test_hostile_lines_are_skipped(line) -> None:
    assert decode_line(line) is None
