"""Attention within documents: what several documents in one sequence change in the model.

Everything follows from each token's place in its document: a token attends to as many tokens before it as it
has in its own document, and turns by its place there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_mask(positions: Tensor) -> Tensor:
    """Places in documents [b, s] -> which keys each query sees, [b, 1, s, s] bool: those of its document,
    up to itself."""
    places = torch.arange(positions.shape[1], device=positions.device)
    first = places - positions
    mask = (places <= places[:, None]) & (places >= first[:, :, None])
    return mask[:, None]


def rotary_table_at(table: tuple[Tensor, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [s, 1, 1, d / 2] of places in the sequence -> [s, b, 1, d / 2] of places in
    documents, [b, s]."""
    cos, sin = table
    places = positions.t()
    return cos[places, 0], sin[places, 0]
