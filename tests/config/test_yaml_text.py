"""YAML 1.2 scalars, line numbers, and what is left out of YAML."""

from __future__ import annotations

import math

import pytest

from llmtrain.config.reading.nodes import Scalar, Table, to_plain
from llmtrain.config.reading.yaml_text import parse_document, resolve_scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e6", 1e6),
        ("1E+6", 1e6),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5", -1.5),
        ("12", 12),
        ("-12", -12),
        ("+12", 12),
        ("012", 12),
        ("0o17", 15),
        ("0xff", 255),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("-.inf", -math.inf),
        # text in YAML 1.2, something else in YAML 1.1
        ("24:00:00", "24:00:00"),
        ("1:30", "1:30"),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("0b11", "0b11"),
        ("<<", "<<"),
        ("1e", "1e"),
        (".", "."),
        ("tRue", "tRue"),
        ("9" * 500, math.inf),
    ],
)
def test_scalar(text: str, value) -> None:
    found = resolve_scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_nan() -> None:
    found = resolve_scalar(".nan")
    assert isinstance(found, float)
    assert math.isnan(found)


def test_quoted_scalars_are_text() -> None:
    node, problems = parse_document("a: '3e-4'\nb: \"true\"\nc: |\n  12\n", "f")
    assert not problems
    assert to_plain(node) == {"a": "3e-4", "b": "true", "c": "12\n"}


def test_places() -> None:
    node, problems = parse_document("# head\na: 1\n\nb:\n  c: [1,\n    2]\n  d: {e: x}\n", "f.yaml")
    assert not problems
    assert isinstance(node, Table)
    assert node.keys == {"a": "f.yaml:2", "b": "f.yaml:4"}
    inner = node.entries["b"]
    assert isinstance(inner, Table)
    assert inner.keys == {"c": "f.yaml:5", "d": "f.yaml:7"}
    assert inner.entries["c"].items[1].where == "f.yaml:6"


def test_windows_line_ends_and_byte_order_mark_do_no_harm(tmp_path) -> None:
    from llmtrain.config.reading.document import read_table

    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: x\r\nsteps: 3\r\n")
    table, problems = read_table("recipes", path)
    assert not problems
    assert table is not None
    assert to_plain(table) == {"name": "x", "steps": 3}
    assert table.keys["steps"].endswith(":2")


def test_a_billion_laughs_cost_nothing() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    node, problems = parse_document("\n".join(lines), "f")
    assert node is not None
    assert len(problems) == 30 + 29


def test_deep_nesting_is_no_stack_overflow() -> None:
    for text in ("[" * 100_000, "{a: " * 100_000, "- " * 100_000 + "x"):
        node, problems = parse_document(text, "f")
        assert node is None
        assert problems


def test_first_of_two_keys_is_kept() -> None:
    node, problems = parse_document("a: 1\na: 2\n", "f")
    assert to_plain(node) == {"a": 1}
    assert [problem.where for problem in problems] == ["f:2"]


def test_an_alias_has_no_value_and_says_so() -> None:
    node, _ = parse_document("a: &x 1\nb: *x\n", "f")
    assert isinstance(node, Table)
    broken = node.entries["b"]
    assert isinstance(broken, Scalar)
    assert broken.unreadable
