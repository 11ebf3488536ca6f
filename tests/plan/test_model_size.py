"""Parameters and FLOPs against published counts and hand-made sums."""

from __future__ import annotations

import pytest

from llmtrain.config.model import ModelConfig
from llmtrain.plan.model_size import block_shape, flops_per_token, model_size, parameter_count
from tests.support.plans import GPT_175B, gpt

LLAMA_3_8B = ModelConfig(
    kind="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn_hidden=14336, vocab=128256, sequence=8192
)
LLAMA_3_70B = ModelConfig(
    kind="llama", layers=80, hidden=8192, heads=64, kv_heads=8, ffn_hidden=28672, vocab=128256, sequence=8192
)
GPT_2 = gpt(12, 768, 12, vocab=50257, sequence=1024)
MIXTRAL_8X7B = ModelConfig(
    kind="moe",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn_hidden=14336,
    vocab=32000,
    sequence=4096,
    experts=8,
    experts_per_token=2,
)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (LLAMA_3_8B, 8_030_261_248),  # the released checkpoint's count
        (LLAMA_3_70B, 70_553_706_496),  # the released checkpoint's count
        (GPT_2, 124_439_808),  # the released checkpoint's count
        (MIXTRAL_8X7B, 46_702_792_704),  # the released checkpoint's count
    ],
    ids=["llama-3-8b", "llama-3-70b", "gpt-2", "mixtral-8x7b"],
)
def test_counts_are_those_of_released_checkpoints(model, parameters):
    assert parameter_count(model) == parameters


def test_gpt_3_is_175_billion():
    assert parameter_count(GPT_175B) == pytest.approx(175e9, rel=0.01)


def test_flops_follow_korthikanti_appendix_a():
    """72 b s l h^2 (1 + s/(6h) + V/(12 l h)) per step, with b s = 1 token."""
    layers, hidden, sequence, vocab = 96, 12288, 2048, 51200
    expected = 72 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocab / (12 * layers * hidden))
    assert flops_per_token(GPT_175B) == pytest.approx(expected, rel=1e-12)


def test_grouped_queries_shrink_keys_and_values_only():
    shape = block_shape(LLAMA_3_8B)
    assert shape.attention_matrix == 4096 * 4096 * 2 + 4096 * 1024 * 2


def test_experts_add_parameters_but_only_the_chosen_ones_compute():
    dense = ModelConfig(kind="llama", layers=2, hidden=64, heads=4, ffn_hidden=128, vocab=100, sequence=32)
    moe = ModelConfig(
        kind="moe",
        layers=2,
        hidden=64,
        heads=4,
        ffn_hidden=128,
        vocab=100,
        sequence=32,
        experts=4,
        experts_per_token=1,
    )
    router = 2 * 64 * 4
    assert parameter_count(moe) == parameter_count(dense) + 2 * 3 * (3 * 64 * 128) + router
    assert flops_per_token(moe) == pytest.approx(flops_per_token(dense) + 6 * router)


def test_a_tied_head_is_counted_once():
    tied = ModelConfig(
        kind="llama", layers=2, hidden=64, heads=4, vocab=100, sequence=32, tie_embeddings=True
    )
    untied = ModelConfig(
        kind="llama", layers=2, hidden=64, heads=4, vocab=100, sequence=32, tie_embeddings=False
    )
    assert model_size(untied).parameters - model_size(tied).parameters == 100 * 64
