"""The valid name that a wrong one probably means: typing errors, short forms, what other tools call it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches

SYNONYMS: dict[str, str] = {
    "num_layers": "layers",
    "n_layers": "layers",
    "n_layer": "layers",
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "d_model": "hidden",
    "n_embd": "hidden",
    "dim": "hidden",
    "num_heads": "heads",
    "n_heads": "heads",
    "n_head": "heads",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "n_kv_heads": "kv_heads",
    "num_query_groups": "kv_heads",
    "intermediate_size": "ffn_hidden",
    "ffn_hidden_size": "ffn_hidden",
    "vocab_size": "vocab",
    "seq_length": "sequence",
    "seq_len": "sequence",
    "sequence_length": "sequence",
    "context_length": "sequence",
    "max_position_embeddings": "sequence",
    "num_experts": "experts",
    "top_k": "experts_per_token",
    "global_size": "global",
    "global_batch_size": "global",
    "micro_batch_size": "micro",
    "micro_batch": "micro",
    "batch_size": "global",
    "gradient_accumulation": "accumulation",
    "gradient_accumulation_steps": "accumulation",
    "tensor_parallel": "tp",
    "tensor_model_parallel_size": "tp",
    "pipeline_parallel": "pp",
    "pipeline_model_parallel_size": "pp",
    "data_parallel": "dp",
    "context_parallel": "cp",
    "expert_parallel": "ep",
    "virtual_pipeline": "vpp",
    "activation_checkpointing": "recompute",
    "zero_stage": "zero",
    "dtype": "mode",
    "lr": "learning_rate",
    "weight_decay_rate": "weight_decay",
    "warmup": "warmup_steps",
    "min_lr": "final",
    "max_lr": "peak",
    "grad_clip": "clip",
    "max_steps": "steps",
    "train_iters": "steps",
    "interval": "every",
    "gpus": "gpus_per_node",
    "num_nodes": "nodes",
    "gpu": "accelerator",
    "network": "inter_node",
    "interconnect": "inter_node",
    "scheduler": "backend",
    "env": "environment",
    "ib": "ib_hdr",
    "infiniband": "ib_hdr",
    "ethernet": "tcp",
}
"""What other tools call a key -> its name here."""


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that is most likely meant, or None."""
    word = _plain(name)
    names = {_plain(entry): entry for entry in known}
    found = _nearest(word, names)
    return names[found] if found is not None else None


def _nearest(word: str, names: Collection[str]) -> str | None:
    for exact in (word, SYNONYMS.get(word)):
        if exact in names:
            return exact
    for name in names:
        if sorted(name) == sorted(word):
            return name
    if close := get_close_matches(word, names, n=1, cutoff=0.7):
        return close[0]
    for name in names:
        if len(word) >= 3 and (name.startswith(word) or word.startswith(f"{name}_")):
            return name
    parts = {part: name for name in names for part in name.split("_") if len(part) > 2}
    if close := get_close_matches(word, parts, n=1, cutoff=0.75):
        return parts[close[0]]
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    return close[0] if close else None


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")
