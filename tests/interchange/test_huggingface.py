"""Hugging Face folders: what transformers wrote trains here, and what is exported here runs there, with equal
numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from llmtrain.config.huggingface import recipe_keys
from llmtrain.config.layout import Layout
from llmtrain.config.model import ModelConfig, RopeConfig
from llmtrain.engine.checkpoint.load import load_pieces
from llmtrain.engine.checkpoint.pieces import ALONE, whole
from llmtrain.engine.checkpoint.save import save_checkpoint
from llmtrain.engine.state import state_pieces
from llmtrain.errors import CheckpointError, UsageError
from llmtrain.run.checkpoints import CheckpointInfo, Manifest, read_manifest, verify
from llmtrain.run.checkpoints.arrays import read_tensor
from llmtrain.run.interchange.export import export_huggingface
from llmtrain.run.interchange.importing import import_huggingface
from llmtrain.run.interchange.names import correspondence, logical_shapes
from llmtrain.run.interchange.safetensors_files import find_tensors, from_float32, to_float32
from llmtrain.run.interchange.start import start_info
from tests.support.engine_cases import Case, build, gpt, llama, recipe
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine

LLAMA3 = RopeConfig(
    theta=500000.0,
    scaling="llama3",
    factor=8.0,
    low_frequency_factor=1.0,
    high_frequency_factor=4.0,
    original_sequence=16,
)
MODELS: dict[str, tuple[ModelConfig, str]] = {
    "llama": (llama(), "LlamaForCausalLM"),
    "llama tied, no groups": (llama(tie_embeddings=True, kv_heads=4), "LlamaForCausalLM"),
    "llama, biases": (llama(bias=True, qkv_bias=True), "LlamaForCausalLM"),
    "llama 3 rope": (llama(rope=LLAMA3), "LlamaForCausalLM"),
    "llama, linear rope": (llama(rope=RopeConfig(scaling="linear", factor=2.0)), "LlamaForCausalLM"),
    "llama, wide heads": (llama(head_dim=16), "LlamaForCausalLM"),
    "qwen 2": (llama(qkv_bias=True), "Qwen2ForCausalLM"),
    "qwen 3": (llama(qk_norm=True, head_dim=16), "Qwen3ForCausalLM"),
    "gpt-2": (gpt(), "GPT2LMHeadModel"),
    "gpt-2 untied": (gpt(tie_embeddings=False), "GPT2LMHeadModel"),
}
INFO = CheckpointInfo(run_id="r", recipe_digest="d", step=0, consumed_samples=0)


def save_random(root, model: ModelConfig):
    """A checkpoint with random weights, norms and biases included."""
    generator = torch.Generator().manual_seed(3)
    pieces = []
    for name, shape in logical_shapes(model).items():
        centre = 1.0 if name.endswith("norm.weight") or name.endswith("_norm") else 0.0
        values = centre + 0.1 * torch.randn(shape, generator=generator)
        pieces += [whole(f"{name}/{part}", values) for part in ("master", "exp_avg", "exp_avg_sq")]
    return save_checkpoint(root, INFO, pieces, ALONE).checkpoint


def tokens_of(model: ModelConfig) -> torch.Tensor:
    return torch.randint(0, model.vocab, (2, model.sequence + 1), generator=torch.Generator().manual_seed(5))


def engine_losses(rank: int, world_size: int, model: ModelConfig, checkpoint: str) -> list[list[float]]:
    """Loss of every token [s, b] by the engine, with a checkpoint's weights."""
    from pathlib import Path

    parts = build(Case(recipe(model)), rank)
    load_pieces(Path(checkpoint), state_pieces(parts.buckets, parts.groups))
    parts.buckets.publish()
    stage, tokens = parts.stages[0], tokens_of(model)
    with torch.no_grad():
        losses = stage.losses(stage(tokens[:, :-1]), tokens[:, 1:].contiguous())
    return losses.double().tolist()


def their_logits(folder, model: ModelConfig) -> torch.Tensor:
    """Logits [b, s, v] by transformers in FP32."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits: torch.Tensor = loaded(tokens_of(model)[:, :-1]).logits
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_an_export_gives_the_engines_numbers_in_transformers(tmp_path, name):
    model, architecture = MODELS[name]
    saved = save_random(tmp_path / "checkpoints", model)
    assert export_huggingface(saved.path, tmp_path / "hf", model) == architecture
    logits = their_logits(tmp_path / "hf", model)
    targets = tokens_of(model)[:, 1:]
    theirs = torch.nn.functional.cross_entropy(logits.transpose(1, 2).double(), targets, reduction="none").t()
    (ours,) = run_ranks(engine_losses, 1, tmp_path, model, str(saved.path))
    assert (torch.tensor(ours, dtype=torch.float64) - theirs).abs().max() < 1e-5
    assert theirs.std() > 0.05, "the numbers must differ, or equality says little"


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_wrote_comes_back(tmp_path, name):
    """transformers -> import -> export -> transformers: logits equal within 1e-5 in FP32, weights bit for
    bit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model, _ = MODELS[name]
    export_huggingface(save_random(tmp_path / "a", model).path, tmp_path / "config", model)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(tmp_path / "config")
    config.initializer_range = 0.3
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "theirs")
    keys, problems = recipe_keys(
        json.loads((tmp_path / "theirs" / "config.json").read_text()), "config.json", "x"
    )
    assert problems == []
    assert (keys["layers"], keys["hidden"], keys["kind"]) == (model.layers, model.hidden, model.kind)
    saved = import_huggingface(tmp_path / "theirs", tmp_path / "b", model, INFO, shard_bytes=100_000)
    assert verify(saved.path) == []
    export_huggingface(saved.path, tmp_path / "back", model)
    assert torch.equal(their_logits(tmp_path / "theirs", model), their_logits(tmp_path / "back", model))
    manifest = read_manifest(saved.path)
    assert len(manifest.shards) > 1
    assert not read_tensor(saved.path, manifest, "final_norm.weight/exp_avg").any()


@pytest.mark.parametrize("name", ["llama", "qwen 3", "gpt-2", "llama, biases"])
def test_shapes_are_the_engines(tmp_path, name):
    model, _ = MODELS[name]
    (found,) = run_ranks(engine_shapes, 1, tmp_path, model)
    assert found == logical_shapes(model)


def engine_shapes(rank: int, world_size: int, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    parts = build(Case(recipe(model)), rank)
    pieces = state_pieces(parts.buckets, parts.groups)
    return {p.key.removesuffix("/master"): p.global_shape for p in pieces if p.key.endswith("/master")}


def test_large_models_are_written_in_several_files(tmp_path):
    model = llama()
    saved = save_random(tmp_path / "checkpoints", model)
    export_huggingface(saved.path, tmp_path / "one", model)
    seen = []
    export_huggingface(
        saved.path,
        tmp_path / "many",
        model,
        file_bytes=40_000,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 3
    assert torch.equal(their_logits(tmp_path / "one", model), their_logits(tmp_path / "many", model))
    assert seen[-1][0] == seen[-1][1]
    assert set(find_tensors(tmp_path / "many")) == {tensor.name for tensor in correspondence(model).tensors}
    again = import_huggingface(tmp_path / "many", tmp_path / "c", model, INFO)
    first, second = (read_manifest(path) for path in (saved.path, again.path))
    for key in first.tensors:
        if key.endswith("/master"):
            ours = read_tensor(saved.path, first, key)
            assert np.array_equal(ours, read_tensor(again.path, second, key))


def test_bfloat16_rounds_as_torch_does(tmp_path):
    values = torch.cat(
        [torch.randn(1000), torch.tensor([0.0, -0.0, 1e-40, 3e38, float("inf"), -float("inf")])]
    )
    stored = from_float32(values.numpy(), "BF16")
    assert bytes(stored) == values.bfloat16().view(torch.uint8).numpy().tobytes()
    assert torch.equal(torch.from_numpy(to_float32(stored, "BF16", (1006,))), values.bfloat16().float())
    assert torch.isnan(
        torch.frombuffer(from_float32(np.array([np.nan], "<f4"), "BF16"), dtype=torch.bfloat16)
    ).all()
    model = llama()
    export_huggingface(
        save_random(tmp_path / "checkpoints", model).path, tmp_path / "hf", model, dtype="BF16"
    )
    assert torch.isfinite(their_logits(tmp_path / "hf", model)).all()
    assert find_tensors(tmp_path / "hf")["lm_head.weight"].dtype == "BF16"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64, torch.float32])
def test_every_float_format_is_read(tmp_path, kind):
    from safetensors.torch import save_file

    values = torch.randn(5, 7).to(kind)
    save_file({"x": values, "y": values[0].clone()}, tmp_path / "model.safetensors")
    found = find_tensors(tmp_path)
    assert torch.equal(torch.from_numpy(found["x"].read()), values.float())
    assert torch.equal(torch.from_numpy(found["y"].read()), values[0].float())


def test_the_tokenizer_comes_along(tmp_path):
    (tmp_path / "t").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "other.txt"):
        (tmp_path / "t" / name).write_text("{}")
    saved = save_random(tmp_path / "checkpoints", llama())
    export_huggingface(
        saved.path, tmp_path / "hf", llama(), tokenizer=tmp_path / "t" / "tokenizer.json", separator=7
    )
    names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == names
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 7


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (llama(norm="layernorm"), "only Llama-shaped models"),
        (llama(activation="gelu"), "only Llama-shaped models"),
        (llama(qk_norm=True, qkv_bias=True), "qk_norm is exported as Qwen 3"),
        (llama(qkv_bias=True, head_dim=16), "hidden = heads x head_dim"),
        (gpt(bias=False), "a GPT model is exported as GPT-2"),
        (gpt(kv_heads=2), "a GPT model is exported as GPT-2"),
        (replace(llama(), kind="moe"), "only Llama-shaped models"),
    ],
)
def test_a_shape_that_transformers_does_not_have(model, message):
    with pytest.raises(UsageError, match=message):
        correspondence(model)


def test_a_checkpoint_of_another_model(tmp_path):
    saved = save_random(tmp_path / "checkpoints", llama())
    with pytest.raises(CheckpointError) as raised:
        export_huggingface(saved.path, tmp_path / "hf", llama(layers=3, ffn_hidden=80))
    text = raised.value.text()
    assert "weight 'layers.3.attention.wq' is not of this model" in text
    assert "weight 'layers.0.ffn.gate' is F32 [64, 48], the model's is F32 [80, 48]" in text
    assert not (tmp_path / "hf").exists()


def test_the_engine_accepts_a_start_from_given_weights(tmp_path):
    from llmtrain.engine.state import progress_of, recipe_digest

    case = recipe(llama())
    info = start_info(case, "run-1")
    assert info.recipe_digest == recipe_digest(case)
    manifest = Manifest(info=info, shards=(), tensors={})
    assert progress_of(manifest, case, Layout(), 0, tmp_path).step == 0
