"""Checksums of shards, as `kind:hexadecimal digits`: XXH3 of 128 bits, and SHA-256 as earlier versions wrote.

They find what disks and networks damage, at the speed of memory. A digest that nobody can forge would not
tell more: whoever can write shards can write the manifest too.
"""

from __future__ import annotations

import hashlib
import os
from typing import Protocol

import xxhash

KIND = "xxh128"
"""What is written."""
DIGITS = {KIND: 32, "sha256": 64}
"""Hexadecimal digits of every kind that is read."""
CHUNK = 1 << 22


class _Digest(Protocol):
    """What hashlib and xxhash have in common."""

    def update(self, content: memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class Checksum:
    """The checksum of a file that is being written."""

    def __init__(self) -> None:
        self._digest = _digest_of(KIND)

    def update(self, content: memoryview) -> None:
        """Add the next bytes."""
        self._digest.update(content)

    def text(self) -> str:
        """As it stands in sidecars and manifests."""
        return f"{KIND}:{self._digest.hexdigest()}"


def is_checksum(text: str) -> bool:
    """Whether a text is one, of a kind that is known."""
    kind, _, digits = text.partition(":")
    return len(digits) == DIGITS.get(kind) and set(digits) <= set("0123456789abcdef")


def has_checksum(descriptor: int, checksum: str) -> bool:
    """Whether an open file has a checksum, from its current position on; in bounded memory. Raises
    OSError."""
    kind, _, digits = checksum.partition(":")
    digest, buffer = _digest_of(kind), bytearray(CHUNK)
    view = memoryview(buffer)
    while count := os.readv(descriptor, [buffer]):
        digest.update(view[:count])
    return digest.hexdigest() == digits


def _digest_of(kind: str) -> _Digest:
    return xxhash.xxh3_128() if kind == KIND else hashlib.sha256()
