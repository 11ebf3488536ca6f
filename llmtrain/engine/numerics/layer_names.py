"""The layers that numbers are told of: the embedding, the blocks, and the head with its norm. Pure."""

from __future__ import annotations

EMBEDDING, HEAD = "embedding", "head"


def layer_names(layers: int) -> tuple[str, ...]:
    """All of a model's layers, in forward order."""
    return (EMBEDDING, *(block_name(layer) for layer in range(layers)), HEAD)


def block_name(layer: int) -> str:
    """Name of a block."""
    return f"layers.{layer}"


def layer_of(tensor: str) -> str:
    """Layer that a logical tensor belongs to, e.g. `layers.3` of `layers.3.attention.wq`."""
    first, _, rest = tensor.partition(".")
    if first == "layers":
        return f"layers.{rest.partition('.')[0]}"
    return EMBEDDING if first in ("embedding", "positions") else HEAD
