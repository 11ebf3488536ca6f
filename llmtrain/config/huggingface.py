"""`model: {from: config.json}`: the shape of a Hugging Face model folder in the recipe's own keys.

Key names are those of the transformers library's `LlamaConfig`, `MistralConfig`, `Qwen2Config`,
`Qwen3Config`, `GPT2Config` and `MixtralConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtrain.config.reading.document import display_name
from llmtrain.config.reading.nodes import Scalar, Table, from_plain, merge, printable, shown
from llmtrain.errors import Problem
from llmtrain.resources import user_path

FROM = "from"
"""Key inside `model` that names the folder or its `config.json`."""


def expand_from(model: Table) -> tuple[Table, list[Problem]]:
    """The model section with `from` replaced by what the file says; keys that stand beside it win."""
    source = model.entries.get(FROM)
    if source is None:
        return model, []
    rest = Table(
        {key: node for key, node in model.entries.items() if key != FROM},
        {key: place for key, place in model.keys.items() if key != FROM},
        model.where,
    )
    if not isinstance(source, Scalar) or not isinstance(source.value, str) or not source.value:
        where = source.where
        return rest, [
            Problem(
                where, f"model.from must be a path, not {shown(source)}", "e.g. `from: my-model/config.json`"
            )
        ]
    path = Path(source.base, user_path(source.value))
    path = path / "config.json" if path.is_dir() else path
    content, problem = _read(path, source)
    if content is None:
        return rest, [problem] if problem is not None else []
    shape, problems = recipe_keys(content, display_name(path), source.where)
    base = from_plain(shape, display_name(path))
    assert isinstance(base, Table)
    return merge(base, rest), problems


def _read(path: Path, source: Scalar) -> tuple[Mapping[str, Any] | None, Problem | None]:
    name = printable(display_name(path), 200)
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, Problem(source.where, f"model.from: no such file `{name}`")
    except (OSError, ValueError, RecursionError) as error:
        reason = (
            error.strerror.lower() if isinstance(error, OSError) and error.strerror else "not a JSON file"
        )
        return None, Problem(source.where, f"model.from: cannot read `{name}`: {reason}")
    if not isinstance(content, dict):
        return None, Problem(source.where, f"model.from: `{name}` holds no JSON object")
    return content, None


def recipe_keys(config: Mapping[str, Any], name: str, where: str) -> tuple[dict[str, Any], list[Problem]]:
    """Recipe keys of a `config.json`; `name` is the file, `where` the place that named it."""
    architectures = config.get("architectures")
    listed = (
        [entry for entry in architectures if isinstance(entry, str)]
        if isinstance(architectures, list)
        else []
    )
    found = next((entry for entry in listed if entry in _READERS), None)
    if found is None:
        said = ", ".join(listed) or str(config.get("model_type", "none"))
        return {}, [
            Problem(
                where,
                f"model.from: {name} is of architecture {printable(said)}, which is not known",
                f"known: {', '.join(sorted(_READERS))}; or write the shape out",
            )
        ]
    keys, problem = _READERS[found](config)
    problems = [Problem(where, f"model.from: {name}: {problem}")] if problem else []
    return {key: value for key, value in keys.items() if value is not None}, problems


def _llama(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Llama, Mistral and everything of their shape."""
    keys, problem = _gated(config)
    attention, others = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    if attention != others:
        problem = problem or f"attention_bias = {attention} with mlp_bias = {others} is not known".lower()
    return {**keys, "bias": others, "qkv_bias": attention}, problem


def _gated(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What all families with gated feed-forward blocks and rotary positions share."""
    scaling, problem = _rope_scaling(config)
    keys = {
        "kind": "llama",
        "layers": config.get("num_hidden_layers"),
        "hidden": config.get("hidden_size"),
        "heads": config.get("num_attention_heads"),
        "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "ffn_hidden": config.get("intermediate_size"),
        "vocab": config.get("vocab_size"),
        "sequence": _sequence(config),
        "norm": "rmsnorm",
        "norm_epsilon": config.get("rms_norm_eps"),
        "activation": "swiglu" if config.get("hidden_act", "silu") == "silu" else config.get("hidden_act"),
        "rope": {"theta": _rope_value(config, "rope_theta", 10000.0), **scaling},
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "init_std": config.get("initializer_range"),
    }
    partial = _rope_value(config, "partial_rotary_factor", 1.0)
    if partial != 1.0:
        problem = problem or f"partial_rotary_factor = {printable(str(partial))} is not known"
    return keys, problem


def _sequence(config: Mapping[str, Any]) -> Any:
    """Longest sequence on which full attention is what the model does: a sliding window ends it."""
    longest, window = config.get("max_position_embeddings"), config.get("sliding_window")
    slides = config.get("use_sliding_window", True) is True
    if slides and isinstance(window, int) and isinstance(longest, int):
        return min(longest, window)
    return longest


def _qwen2(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Qwen 2 and 2.5: a bias on the query/key/value projection only."""
    keys, problem = _gated(config)
    return {**keys, "bias": False, "qkv_bias": True}, problem


def _qwen3(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Qwen 3: norms on queries and keys."""
    keys, problem = _llama(config)
    return {**keys, "qk_norm": True}, problem


def _mixtral(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Mixtral: a routed feed-forward block."""
    keys, problem = _llama(config)
    experts = {
        "experts": config.get("num_local_experts"),
        "experts_per_token": config.get("num_experts_per_tok"),
    }
    return {**keys, **experts, "kind": "moe"}, problem


def _gpt2(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """GPT-2."""
    gelu = str(config.get("activation_function", "gelu_new")).startswith("gelu")
    keys = {
        "kind": "gpt",
        "layers": config.get("n_layer"),
        "hidden": config.get("n_embd"),
        "heads": config.get("n_head"),
        "ffn_hidden": config.get("n_inner"),
        "vocab": config.get("vocab_size"),
        "sequence": config.get("n_positions", config.get("n_ctx")),
        "norm_epsilon": config.get("layer_norm_epsilon"),
        "activation": "gelu" if gelu else config.get("activation_function"),
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "init_std": config.get("initializer_range"),
    }
    return keys, ""


def _rope_value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """A rotary value: newer files keep them together in `rope_parameters`."""
    together = config.get("rope_parameters")
    inner = together.get(key) if isinstance(together, dict) else None
    return config.get(key, default if inner is None else inner)


def _rope_scaling(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict):
        return {}, ""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return {}, ""
    if kind not in {"linear", "llama3"}:
        return {}, f"rope scaling `{printable(str(kind))}` is not known; known: linear, llama3"
    names = {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_sequence",
    }
    taken = {ours: scaling[theirs] for theirs, ours in names.items() if scaling.get(theirs) is not None}
    return {"scaling": kind, **taken}, ""


_READERS = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "MixtralForCausalLM": _mixtral,
    "GPT2LMHeadModel": _gpt2,
}
