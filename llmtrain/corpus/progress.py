"""How a preparation tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a preparation is."""

    phase: str
    """wait | digest | tokenise | merge | check | learn | order"""
    done: int = 0
    """Input bytes."""
    total: int = 0


Report = Callable[[Progress], None]
"""Called often, in the preparing thread; an exception from it ends the preparation, which can go on later."""
