"""JSON of every typed value: there and back, strict on the way in; and the digest."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.codec import canonical_json, digest, from_json, to_json
from llmtrain.config.job import JobSpec, resolve
from llmtrain.config.layout import Layout
from llmtrain.config.reading.build import Builder
from llmtrain.config.reading.schema import (
    AnyType,
    ChoiceType,
    FieldType,
    ListType,
    MapType,
    ScalarType,
    SectionType,
    UnionType,
    fields_of,
)
from llmtrain.config.recipe import BatchConfig, MicroRange, Recipe
from llmtrain.errors import ConfigError, ExitStatus


def values(kind: FieldType) -> st.SearchStrategy[Any]:
    """Any value that a field may hold."""
    match kind:
        case ChoiceType(choices, enum):
            return st.sampled_from([enum(choice) if enum else choice for choice in choices])
        case SectionType(cls):
            return instances(cls)
        case ListType(item):
            return st.lists(values(item), max_size=3).map(tuple)
        case MapType(item):
            return st.dictionaries(st.text(max_size=5), values(item), max_size=3)
        case UnionType(members, optional):
            options = [values(member) for member in members]
            return st.one_of(*([st.none()] if optional else []), *options)
        case AnyType():
            return st.none() | st.booleans() | st.text(max_size=5)
        case ScalarType():
            return scalars(kind)


def scalars(kind: ScalarType) -> st.SearchStrategy[Any]:
    if kind.pattern is not None:
        return st.sampled_from(["a", "tiny", "a.b-c_9"])
    low, high = kind.bounds.low, kind.bounds.high
    if kind.python is int:
        return st.integers(int(low or 0), int(min(high or 2**53, 2**53)))
    if kind.python is float:
        numbers = st.floats(low, high, allow_nan=False, allow_infinity=False)
        return numbers.filter(kind.bounds.holds)
    return {str: st.text(max_size=8), bool: st.booleans(), Path: st.just(Path("a/b"))}[kind.python]


def instances(cls: type) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{entry.name: values(entry.type) for entry in fields_of(cls)})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(instances(Recipe), instances(ClusterProfile), instances(Layout)))
def test_there_and_back(value: Any) -> None:
    text = json.dumps(to_json(value))
    assert from_json(type(value), json.loads(text)) == value


def test_job_spec_there_and_back() -> None:
    spec = resolve("gpt-175b", "a100-32x8")
    assert from_json(JobSpec, json.loads(json.dumps(to_json(spec)))) == spec


def test_keys_are_those_of_yaml() -> None:
    batch = BatchConfig(global_size=8, micro=MicroRange(min=1, max=4))
    assert to_json(batch) == {
        "global": 8,
        "micro": {"min": 1, "max": 4},
        "accumulation": "auto",
        "ramp": None,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dq": 2}, "unknown key `dq`"),
        ({"dp": "2"}, "dp must be a whole number >= 1, not `2`"),
        ({"dp": 2.0}, "dp must be a whole number >= 1, not `2.0`"),
        ({"dp": True}, "dp must be a whole number >= 1, not `true`"),
        ({"zero": True}, "zero must be one of 0, 1, 2, 3, not `true`"),
        ({"dp": None}, "dp must be a whole number >= 1, not nothing"),
        ({"dp": [1]}, "dp must be a whole number >= 1, not a list of 1"),
        ({"schedule": {}}, "schedule must be one of 1f1b, interleaved, zero-bubble, not a mapping"),
    ],
)
def test_strict(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_json(Layout, {**to_json(Layout()), **change}, where="plan.json")
    assert [problem.where for problem in error.value.problems] == ["plan.json"]
    assert error.value.problems[0].message == message
    assert error.value.exit_status == ExitStatus.USAGE


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        from_json(Recipe, {"name": "A B", "model": {"kind": "bert"}, "batch": {"global": 0}, "x": 1})
    said = [problem.message for problem in error.value.problems]
    assert len(said) == 9
    assert "unknown key `x`" in said
    assert "missing key `train`" in said


def test_not_json() -> None:
    with pytest.raises(ConfigError):
        from_json(Layout, {"dp": object()})
    with pytest.raises(ConfigError):
        from_json(Layout, [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        to_json({"a": object()})
    with pytest.raises(TypeError):
        to_json([1])


@dataclasses.dataclass(frozen=True)
class _Measured:
    loss: float
    note: Literal["a"] = "a"


def test_results_may_be_infinite_but_their_digest_may_not() -> None:
    assert from_json(_Measured, {"loss": float("inf")}).loss == float("inf")
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(to_json(_Measured(float("nan"))))


def test_digest_is_of_the_content_and_stable() -> None:
    assert digest({"b": 1, "a": [1.5, "x"]}) == digest({"a": [1.5, "x"], "b": 1})
    assert digest({"a": 1}) != digest({"a": 2})
    # pinned: runs on disk carry it
    assert digest({"a": 1}) == "015abd7f5cc57a2d"


def test_annotations_that_files_cannot_hold_are_refused() -> None:
    @dataclasses.dataclass
    class Bad:
        value: set[int]

    with pytest.raises(TypeError, match="no file can hold"):
        Builder().section(_resolved(Bad), None)  # type: ignore[arg-type]


def _resolved(cls: type) -> type:
    cls.__annotations__ = {"value": set[int]}
    return cls
