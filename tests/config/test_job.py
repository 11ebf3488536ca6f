"""Resolve: defaults, overrides, the digest, and values made in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.config.codec import to_json
from llmtrain.config.defaults import complete_model, complete_recipe
from llmtrain.config.job import check, job_spec, resolve
from llmtrain.config.load import load_profile, load_recipe
from llmtrain.config.model import ModelConfig, RopeConfig
from llmtrain.config.recipe import MicroRange
from llmtrain.errors import ConfigError
from tests.support.documents import PROFILE, RECIPE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "c.yaml").write_text(PROFILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resolved(*overrides: str):
    return resolve("r.yaml", "c.yaml", overrides)


def test_nothing_is_left_open(folder: Path) -> None:
    model = resolved().recipe.model
    assert model.head_dim == 16
    assert model.ffn_hidden == 256
    assert (model.norm, model.activation) == ("rmsnorm", "swiglu")
    assert (model.bias, model.qkv_bias, model.tie_embeddings) == (False, False, False)
    assert model.rope == RopeConfig()
    assert resolved().recipe.learning_rate.final == pytest.approx(3e-5)


def test_defaults_of_the_gpt_family(folder: Path) -> None:
    model = resolved("model.kind=gpt", "model.kv_heads=null").recipe.model
    assert model.kv_heads == 4
    assert model.ffn_hidden == 256
    assert (model.norm, model.activation) == ("layernorm", "gelu")
    assert (model.bias, model.qkv_bias, model.tie_embeddings, model.rope) == (True, True, True, None)


@pytest.mark.parametrize(
    ("hidden", "ffn"),
    [(64, 256), (128, 512), (768, 2048), (4096, 11008), (8192, 22016)],
)
def test_gated_width_is_rounded_up(hidden: int, ffn: int) -> None:
    model = ModelConfig(kind="llama", layers=1, hidden=hidden, heads=1, sequence=8)
    assert complete_model(model).ffn_hidden == ffn


def test_completing_twice_changes_nothing(folder: Path) -> None:
    recipe = resolved().recipe
    assert complete_recipe(recipe) == recipe


def test_tokens_become_whole_steps(folder: Path) -> None:
    assert resolved("train.tokens=256", "learning_rate.warmup_steps=0").recipe.train.steps == 1
    train = resolved("train.tokens=257", "learning_rate.warmup_steps=0").recipe.train
    assert (train.steps, train.tokens) == (2, None)


def test_one_length_replaces_the_other(folder: Path) -> None:
    assert resolved("train.tokens=1M").recipe.train.steps == 3907
    assert resolved("train.tokens=1M", "train.tokens=null", "train.steps=7").recipe.train.steps == 7
    with pytest.raises(ConfigError):
        resolved("train.steps=null")


def test_overrides_are_typed_by_their_field(folder: Path) -> None:
    spec = resolved(
        "batch.micro={max: 4}",
        "checkpoint.every=24:00:00",
        "learning_rate.peak=1e-3",
        "model.rope.theta=5e5",
        "cluster.nodes=4",
        "cluster.environment.variables.OMP_NUM_THREADS=1",
        "cluster.environment.pass_through=[HOME, LANG]",
        "name='123'",
        "data.corpus=text.txt",
    )
    assert spec.recipe.batch.micro == MicroRange(min=1, max=4)
    assert spec.recipe.checkpoint.every == 86400.0
    assert spec.recipe.learning_rate.peak == 1e-3
    assert spec.recipe.model.rope == RopeConfig(theta=5e5)
    assert spec.cluster.nodes == 4
    assert spec.cluster.environment.variables == {"OMP_NUM_THREADS": "1"}
    assert spec.cluster.environment.pass_through == ("HOME", "LANG")
    assert spec.recipe.name == "123"
    assert spec.recipe.data.corpus == str(folder / "text.txt")


def test_the_last_override_of_a_key_wins(folder: Path) -> None:
    assert resolved("train.seed=1", "train.seed=2").recipe.train.seed == 2


def test_paths_start_at_the_file_that_says_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "r.yaml").write_text(f"{RECIPE}data:\n  corpus: ../text\n  tokenizer: t.json\n")
    spec = resolve("sub/r.yaml", "c.yaml")
    assert spec.recipe.data.corpus == str(folder / "text")
    assert spec.recipe.data.tokenizer == str(folder / "sub" / "t.json")
    assert resolved().recipe.data.corpus == "python-stdlib"


def test_links_take_bits_and_bytes(folder: Path) -> None:
    cluster = resolved().cluster
    assert cluster.inter_node is not None
    assert cluster.inter_node.data.bandwidth == 50e9
    assert cluster.storage.bandwidth == 50e9


def test_digest_follows_the_content_only(folder: Path) -> None:
    before = resolved().digest
    (folder / "r.yaml").write_text(f"# a comment\n{RECIPE}")
    assert resolved().digest == before
    assert resolved("model.head_dim=16").digest == before, "a default written out is the same job"
    assert resolved("train.seed=1").digest != before
    assert resolved("cluster.spares=0").digest == before
    assert resolved("cluster.nodes=3").digest != before


def test_values_made_in_python(folder: Path) -> None:
    recipe, cluster = load_recipe("r.yaml"), load_profile("c.yaml")
    spec = job_spec(recipe, cluster)
    assert spec == resolved()
    assert job_spec(spec.recipe, spec.cluster) == spec, "a resolved recipe resolves to itself"


def test_check_says_what_resolve_would(folder: Path) -> None:
    assert check("r.yaml", "c.yaml") == []
    overrides = ("batch.micro=3", "cluster.spares=9")
    with pytest.raises(ConfigError) as error:
        resolve("r.yaml", "c.yaml", overrides)
    assert check("r.yaml", "c.yaml", overrides) == list(error.value.problems)
    assert len(error.value.problems) == 2


def test_both_files_missing_is_two_problems(folder: Path) -> None:
    assert len(check("x.yaml", "y.yaml", ("a",))) == 3


def test_json_of_a_spec_holds_no_auto_that_resolve_decides(folder: Path) -> None:
    document = to_json(resolved())
    assert document["recipe"]["train"]["steps"] == 10
    assert document["recipe"]["parallel"]["vpp"] == "auto"
    assert document["recipe"]["batch"]["global"] == 8
