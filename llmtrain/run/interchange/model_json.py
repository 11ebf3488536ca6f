"""`config.json` of a Hugging Face folder, from a recipe's model."""

from __future__ import annotations

from typing import Any

from llmtrain.config.model import ModelConfig, RopeConfig

TORCH_NAMES: dict[str, str] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def model_json(model: ModelConfig, architecture: str, dtype: str, separator: int | None) -> dict[str, Any]:
    """Return the keys that transformers reads; `dtype` is the safetensors name, `separator` the end-of-text
    token."""
    common = {
        "architectures": [architecture],
        "bos_token_id": separator,
        "eos_token_id": separator,
        "initializer_range": model.init_std,
        "tie_word_embeddings": bool(model.tie_embeddings),
        "torch_dtype": TORCH_NAMES[dtype],
        "vocab_size": model.vocab,
    }
    if architecture == "GPT2LMHeadModel":
        return common | _gpt2(model)
    return common | _llama(model, architecture)


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "layer_norm_epsilon": model.norm_epsilon,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn_hidden,
        "n_layer": model.layers,
        "n_positions": model.sequence,
    }


def _llama(model: ModelConfig, architecture: str) -> dict[str, Any]:
    rope = model.rope or RopeConfig()
    biases = {"attention_bias": bool(model.qkv_bias), "mlp_bias": bool(model.bias)}
    return {
        "model_type": {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}.get(architecture, "qwen3"),
        **(biases if architecture == "LlamaForCausalLM" else {}),
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "max_position_embeddings": model.sequence,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": model.norm_epsilon,
        "rope_scaling": _scaling(rope),
        "rope_theta": rope.theta,
    }


def _scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    if rope.scaling == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "high_freq_factor": rope.high_frequency_factor,
        "low_freq_factor": rope.low_frequency_factor,
        "original_max_position_embeddings": rope.original_sequence,
    }
