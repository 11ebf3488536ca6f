"""Which tensor of a Hugging Face model is which of ours, by architecture.

Architectures and names are those of the transformers library: LlamaForCausalLM, Qwen2ForCausalLM,
Qwen3ForCausalLM and GPT2LMHeadModel. Rotary positions use the same halves convention, so no row is permuted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.config.model import ModelConfig
from llmtrain.errors import UsageError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TheirTensor:
    """A tensor of theirs: some of ours, one after the other along the first axis, perhaps transposed then."""

    name: str
    ours: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Correspondence:
    """One model in both worlds."""

    architecture: str
    tensors: tuple[TheirTensor, ...]
    shapes: dict[str, Shape]
    """Of ours, by name."""

    def shape(self, tensor: TheirTensor) -> Shape:
        """Shape of a tensor of theirs."""
        parts = [self.shapes[name] for name in tensor.ours]
        whole = (sum(part[0] for part in parts), *parts[0][1:])
        return whole[::-1] if tensor.transposed else whole


def correspondence(model: ModelConfig) -> Correspondence:
    """Map a resolved model; raises UsageError when transformers has no architecture of its shape."""
    shapes = logical_shapes(model)
    if model.kind == "gpt":
        _refuse_unless(
            _is_gpt2(model),
            "a GPT model is exported as GPT-2, which has LayerNorm, GELU, learned positions, biases "
            "everywhere and as many key/value heads as heads",
        )
        return Correspondence("GPT2LMHeadModel", tuple(_gpt2(model)), shapes)
    usual = model.norm == "rmsnorm" and model.activation == "swiglu" and model.rope is not None
    _refuse_unless(
        model.kind == "llama" and usual,
        "only Llama-shaped models (RMSNorm, SwiGLU, rotary positions) and GPT-2",
    )
    return Correspondence(_llama_architecture(model), tuple(_llama(model)), shapes)


def logical_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every weight, as the engine names them in checkpoints."""
    hidden, width = model.hidden, int(model.ffn_hidden or 0)
    shapes: dict[str, Shape] = {"embedding.weight": (model.vocab, hidden)}
    if model.rope is None:
        shapes["positions.weight"] = (model.sequence, hidden)
    head_dim = int(model.head_dim or 0)
    rows = {"q": model.heads * head_dim, "k": int(model.kv_heads or 0) * head_dim}
    rows["v"] = rows["k"]
    for layer in range(model.layers):
        name = f"layers.{layer}"
        for part, count in rows.items():
            shapes[f"{name}.attention.w{part}"] = (count, hidden)
            if model.qkv_bias:
                shapes[f"{name}.attention.b{part}"] = (count,)
        shapes[f"{name}.attention.wo"] = (hidden, rows["q"])
        if model.qk_norm:
            shapes |= {f"{name}.attention.{part}_norm": (head_dim,) for part in "qk"}
        for part in ("gate", "up") if model.activation == "swiglu" else ("up",):
            shapes[f"{name}.ffn.{part}"] = (width, hidden)
            if model.bias:
                shapes[f"{name}.ffn.{part}_bias"] = (width,)
        shapes[f"{name}.ffn.down"] = (hidden, width)
        if model.bias:
            shapes |= {f"{name}.attention.bo": (hidden,), f"{name}.ffn.down_bias": (hidden,)}
        shapes |= _norm(model, f"{name}.attention_norm") | _norm(model, f"{name}.ffn_norm")
    shapes |= _norm(model, "final_norm")
    if not model.tie_embeddings:
        shapes["head.weight"] = (model.vocab, hidden)
    return shapes


def _norm(model: ModelConfig, name: str) -> dict[str, Shape]:
    parts = ("weight", "bias") if model.norm == "layernorm" else ("weight",)
    return {f"{name}.{part}": (model.hidden,) for part in parts}


def _llama_architecture(model: ModelConfig) -> str:
    if model.qk_norm:
        _refuse_unless(
            not model.bias and not model.qkv_bias, "qk_norm is exported as Qwen 3, which has no biases"
        )
        return "Qwen3ForCausalLM"
    if model.qkv_bias == model.bias:
        return "LlamaForCausalLM"
    square = int(model.head_dim or 0) * model.heads == model.hidden
    _refuse_unless(
        bool(model.qkv_bias) and square,
        "a bias on queries, keys and values alone is exported as Qwen 2, where hidden = heads x head_dim",
    )
    return "Qwen2ForCausalLM"


def _is_gpt2(model: ModelConfig) -> bool:
    return (
        model.norm == "layernorm"
        and model.activation == "gelu"
        and model.rope is None
        and bool(model.bias)
        and bool(model.qkv_bias)
        and not model.qk_norm
        and model.kv_heads == model.heads
        and model.heads * int(model.head_dim or 0) == model.hidden
    )


def _refuse_unless(condition: bool, reason: str) -> None:
    if not condition:
        raise UsageError(f"transformers has no architecture of this shape: {reason}", where="model")


def _llama(model: ModelConfig) -> Iterator[TheirTensor]:
    yield TheirTensor("model.embed_tokens.weight", ("embedding.weight",))
    for layer in range(model.layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        yield TheirTensor(f"{theirs}.input_layernorm.weight", (f"{ours}.attention_norm.weight",))
        for part in "qkv":
            yield TheirTensor(f"{theirs}.self_attn.{part}_proj.weight", (f"{ours}.attention.w{part}",))
            if model.qkv_bias:
                yield TheirTensor(f"{theirs}.self_attn.{part}_proj.bias", (f"{ours}.attention.b{part}",))
        yield TheirTensor(f"{theirs}.self_attn.o_proj.weight", (f"{ours}.attention.wo",))
        if model.bias:
            yield TheirTensor(f"{theirs}.self_attn.o_proj.bias", (f"{ours}.attention.bo",))
        if model.qk_norm:
            for part in "qk":
                yield TheirTensor(
                    f"{theirs}.self_attn.{part}_norm.weight", (f"{ours}.attention.{part}_norm",)
                )
        yield TheirTensor(f"{theirs}.post_attention_layernorm.weight", (f"{ours}.ffn_norm.weight",))
        for part in ("gate", "up", "down"):
            yield TheirTensor(f"{theirs}.mlp.{part}_proj.weight", (f"{ours}.ffn.{part}",))
            if model.bias:
                yield TheirTensor(f"{theirs}.mlp.{part}_proj.bias", (f"{ours}.ffn.{part}_bias",))
    yield TheirTensor("model.norm.weight", ("final_norm.weight",))
    if not model.tie_embeddings:
        yield TheirTensor("lm_head.weight", ("head.weight",))


def _gpt2(model: ModelConfig) -> Iterator[TheirTensor]:
    """GPT-2 keeps its linear layers as [in, out] and the three projections in one."""
    yield TheirTensor("transformer.wte.weight", ("embedding.weight",))
    yield TheirTensor("transformer.wpe.weight", ("positions.weight",))
    for layer in range(model.layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        for name, norm in (("ln_1", "attention_norm"), ("ln_2", "ffn_norm")):
            for part in ("weight", "bias"):
                yield TheirTensor(f"{theirs}.{name}.{part}", (f"{ours}.{norm}.{part}",))
        packed = tuple(f"{ours}.attention.w{part}" for part in "qkv")
        yield TheirTensor(f"{theirs}.attn.c_attn.weight", packed, transposed=True)
        yield TheirTensor(f"{theirs}.attn.c_attn.bias", tuple(f"{ours}.attention.b{part}" for part in "qkv"))
        yield TheirTensor(f"{theirs}.attn.c_proj.weight", (f"{ours}.attention.wo",), transposed=True)
        yield TheirTensor(f"{theirs}.attn.c_proj.bias", (f"{ours}.attention.bo",))
        for name, part in (("c_fc", "up"), ("c_proj", "down")):
            yield TheirTensor(f"{theirs}.mlp.{name}.weight", (f"{ours}.ffn.{part}",), transposed=True)
            yield TheirTensor(f"{theirs}.mlp.{name}.bias", (f"{ours}.ffn.{part}_bias",))
    for part in ("weight", "bias"):
        yield TheirTensor(f"transformer.ln_f.{part}", (f"final_norm.{part}",))
    if not model.tie_embeddings:
        yield TheirTensor("lm_head.weight", ("head.weight",))
