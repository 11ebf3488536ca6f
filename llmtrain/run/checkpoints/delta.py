"""Changed bytes of a piece, without loss: XOR with the piece before, split into byte planes, compressed.

A piece is cut into blocks of BLOCK bytes. A block is stored in one of three ways, told apart by its stored
size: nothing (no byte has changed), as many bytes as it has (the new bytes themselves, where compression does
not pay), or fewer (zstd of the planes). Planes keep sign and exponent bytes, which hardly change between two
states, away from the low bytes of the mantissas, which are noise.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 22
"""Bytes of a block; a multiple of every element size."""
LEVEL = 1
"""zstd's level: higher ones gain less than a percent on mantissas."""

Bytes = NDArray[np.uint8]


def block_count(nbytes: int) -> int:
    """Blocks of a piece."""
    return -(-nbytes // BLOCK)


def block_lengths(nbytes: int) -> Iterator[int]:
    """Bytes of every block of a piece."""
    for begin in range(0, nbytes, BLOCK):
        yield min(BLOCK, nbytes - begin)


def encode(new: Bytes, old: Bytes, item: int) -> Iterator[memoryview]:
    """What is stored of every block of a piece. Both are [nbytes], `item` is the bytes of one element; the
    results must be written before the next one is asked for."""
    import zstandard

    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False, write_content_size=True)
    for begin in range(0, len(new), BLOCK):
        block = new[begin : begin + BLOCK]
        changed = np.bitwise_xor(block, old[begin : begin + BLOCK])
        if not changed.any():
            yield memoryview(b"")
            continue
        packed = compressor.compress(np.ascontiguousarray(changed.reshape(-1, item).T).data)
        yield memoryview(packed) if len(packed) < len(block) else block.data


def decode(stored: memoryview, length: int, old: Bytes, item: int) -> None:
    """Turn one block of the piece before, [length], into the new one, in place; raises ValueError when what
    is stored cannot be one."""
    import zstandard

    if not stored.nbytes:
        return
    if stored.nbytes == length:
        old[:] = np.frombuffer(stored, np.uint8)
        return
    try:
        # The frame says its size; a longer one is refused before memory is taken for it.
        if zstandard.frame_content_size(stored) != length:
            raise ValueError("a block is of another length")
        planes = zstandard.ZstdDecompressor().decompress(stored, max_output_size=length)
    except zstandard.ZstdError as error:
        raise ValueError(f"a block cannot be unpacked: {error}") from error
    changed = np.frombuffer(planes, np.uint8).reshape(item, -1).T
    np.bitwise_xor(old.reshape(-1, item), changed, out=old.reshape(-1, item))
