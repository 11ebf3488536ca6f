"""`model: {from: config.json}`: published configurations give the published number of parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.job import resolve
from llmtrain.config.load import load_recipe
from llmtrain.config.model import RopeConfig
from llmtrain.errors import ConfigError
from llmtrain.plan.model_size import model_size

# The keys of published config.json files that describe the shape.
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN_25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN_3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    **MISTRAL_7B,
    "architectures": ["MixtralForCausalLM"],
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(folder: Path, config: dict[str, Any], keys: str = "", *overrides: str):
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    text = f"name: x\nmodel:\n  from: model\n{keys}batch: {{global: 8}}\ntrain: {{steps: 4}}\n"
    (folder / "r.yaml").write_text(text)
    return resolve("r.yaml", "a100-32x8", overrides).recipe


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_31_8B, 8_030_261_248),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN_25_7B, 7_615_616_512),
        (QWEN_3_8B, 8_190_735_360),
        (MIXTRAL_8X7B, 46_702_792_704),
        (GPT2, 124_439_808),
    ],
    ids=["llama", "mistral", "qwen2", "qwen3", "mixtral", "gpt2"],
)
def test_published_parameters(folder: Path, config: dict[str, Any], parameters: int) -> None:
    assert model_size(recipe(folder, config).model).parameters == parameters


def test_llama(folder: Path) -> None:
    model = recipe(folder, LLAMA_31_8B).model
    assert model.kind == "llama"
    assert (model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim) == (32, 4096, 32, 8, 128)
    assert model.rope == RopeConfig(theta=500000, scaling="llama3", factor=8)
    assert (model.sequence, model.vocab, model.norm_epsilon) == (131072, 128256, 1e-5)
    assert (model.bias, model.qkv_bias, model.qk_norm, model.tie_embeddings) == (False, False, False, False)


def test_what_sets_the_families_apart(folder: Path) -> None:
    assert recipe(folder, QWEN_25_7B).model.qkv_bias is True
    assert recipe(folder, QWEN_25_7B).model.sequence == 131072
    assert recipe(folder, QWEN_3_8B).model.qk_norm is True
    assert recipe(folder, QWEN_3_8B).model.rope == RopeConfig(theta=1000000)
    assert recipe(folder, MIXTRAL_8X7B).model.experts == 8
    gpt = recipe(folder, GPT2).model
    assert (gpt.kind, gpt.rope, gpt.tie_embeddings, gpt.bias) == ("gpt", None, True, True)


def test_a_sliding_window_ends_the_sequence(folder: Path) -> None:
    assert recipe(folder, MISTRAL_7B).model.sequence == 4096


def test_keys_beside_it_win(folder: Path) -> None:
    model = recipe(folder, LLAMA_31_8B, "  layers: 4\n  rope: {theta: 10000}\n", "model.sequence=2048").model
    assert (model.layers, model.hidden, model.sequence) == (4, 4096, 2048)
    assert model.rope == RopeConfig(theta=10000, scaling="llama3", factor=8), "rope keys are merged"


def test_the_path_starts_at_the_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe(folder, GPT2)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert load_recipe("../r.yaml").model.layers == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling `yarn` is not known; known: linear, llama3"),
        ({"attention_bias": True}, "attention_bias = true with mlp_bias = false is not known"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not known"),
        ({"architectures": None, "model_type": "t5"}, "is of architecture t5, which is not known"),
        ({"hidden_act": "relu"}, "model.activation must be one of gelu, swiglu, not `relu`"),
        ({"num_hidden_layers": None}, "missing key `model.layers`"),
    ],
)
def test_what_cannot_be_trained_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        recipe(folder, {**LLAMA_31_8B, **change})
    [problem] = error.value.problems
    assert problem.message.endswith(message)


def test_other_problems_are_reported_beside_an_unreadable_file(folder: Path) -> None:
    (folder / "r.yaml").write_text("name: x\nmodel: {from: no.json}\nbatch: {global: 0}\ntrain: {steps: 4}\n")
    with pytest.raises(ConfigError) as error:
        load_recipe("r.yaml")
    assert [problem.where for problem in error.value.problems] == ["r.yaml:2", "r.yaml:3"]
