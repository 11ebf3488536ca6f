"""Whatever the bytes: a value or a ConfigError with a place and a sentence, never anything else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain.config.job import resolve
from llmtrain.config.layout_text import parse_layout
from llmtrain.config.load import load_profile, load_recipe
from llmtrain.errors import ConfigError
from tests.support.documents import PROFILE, RECIPE

SLOW = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FRAGMENTS = [
    *("null", "~", "true", "-1", "0", "1e999", ".nan", "9" * 5000, "[1, 2]", "{a: b}", "[", "}", "'", '"'),
    *(": ", "- ", "&a", "*a", "!!int", "<<: *a", "24:00:00", "80 GB", "400 Gb/s", "auto", "\t", "\r\n"),
    *("\x00", "\ufeff", "\u2028", "?", "|", ">", "%YAML 1.1", "---", "...", "# x", "model:", "min: 5", "@"),
    *("from: config.json", "batch: 3", "\ud7ff", "1_0", "\xe9", "parallel: {tp: 0}", "spares: 99", "`"),
]


@st.composite
def mutations(draw: st.DrawFn, text: str) -> str:
    """A document with a few places cut, doubled, swapped or replaced."""
    generator = random.Random(draw(st.integers(0, 2**32)))
    for _ in range(draw(st.integers(1, 4))):
        place = generator.randrange(len(text) + 1)
        end = min(len(text), place + generator.choice([0, 1, 3, 12]))
        choice = generator.randrange(5)
        if choice == 0:
            text = text[:place] + text[end:]
        elif choice == 1:
            text = text[:place] + generator.choice(FRAGMENTS) + text[end:]
        elif choice == 2:
            text = text[:end] + text[place:]
        elif choice == 3:
            lines = text.split("\n")
            line = generator.randrange(len(lines))
            head = lines[line].split(":")[0]
            lines[line] = f"{head}: {generator.choice(FRAGMENTS)}"
            text = "\n".join(lines)
        else:
            lines = text.split("\n")
            generator.shuffle(lines)
            text = "\n".join(lines)
    return text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "c.yaml").write_text(PROFILE)
    return tmp_path


def explained(error: ConfigError) -> None:
    assert error.problems
    for problem in error.problems:
        assert problem.message.strip()
        assert problem.where
        assert "object at 0x" not in problem.text()
        assert "\n" not in problem.message


@SLOW
@given(text=mutations(RECIPE))
def test_mutated_recipes(folder: Path, text: str) -> None:
    (folder / "m.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_recipe("m.yaml")
    except ConfigError as error:
        explained(error)
        return
    resolve("m.yaml", "h100-32x8")


@SLOW
@given(text=mutations(PROFILE))
def test_mutated_profiles(folder: Path, text: str) -> None:
    (folder / "m.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_profile("m.yaml")
    except ConfigError as error:
        explained(error)


@SLOW
@given(content=st.binary(max_size=200))
def test_random_bytes(folder: Path, content: bytes) -> None:
    (folder / "m.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_recipe("m.yaml")
    explained(error.value)


KEYS = st.sampled_from(
    [
        *("model", "model.rope", "model.layers", "batch.micro", "batch.global", "train.steps", "cluster", ""),
        *("cluster.nodes", "parallel.tp", "data.corpus", "cluster.environment.variables.A", "model.from"),
        *("cluster.inter_node.data", "checkpoint.every", "cluster.accelerator.memory", "name.x"),
    ]
)
PARTS = st.lists(st.sampled_from(["dp=2", "tp=x", "ep=3", "vpp=2", "zero=9", "dp"]))


@SLOW
@given(texts=st.lists(st.tuples(KEYS, st.sampled_from(FRAGMENTS) | st.text(max_size=12)), max_size=3))
def test_overrides(folder: Path, texts: list[tuple[str, str]]) -> None:
    try:
        resolve("r.yaml", "c.yaml", [f"{key}={value}" for key, value in texts])
    except ConfigError as error:
        explained(error)


@SLOW
@given(text=st.text(max_size=40) | PARTS.map(",".join))
def test_layouts(text: str) -> None:
    try:
        assert parse_layout(text).world_size >= 1
    except ConfigError as error:
        explained(error)
