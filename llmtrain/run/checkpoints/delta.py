"""Changed bytes of a piece, without loss: difference to the piece before, split into byte planes, compressed.

A piece is cut into blocks of BLOCK bytes. A block is stored in one of three ways, told apart by its stored
size: nothing (no byte has changed), as many bytes as it has (the new bytes themselves, where compression does
not pay), or fewer (zstd of the planes). Planes keep sign and exponent bytes, which hardly change between two
states, away from the low bytes of the mantissas, which are noise.

The difference is that of the elements' bits taken as whole numbers, which grow with the magnitude of a float,
zigzag-coded (0, -1, 1, -2, ... as 0, 1, 2, 3, ...): small changes have zeros in front whichever way they go,
where a carry makes XOR flip many bits. Earlier versions stored XOR, which is still read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 22
"""Bytes of a block; a multiple of every element size."""
LEVEL = 1
"""zstd's level: higher ones gain less than a percent on mantissas."""

Bytes = NDArray[np.uint8]

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


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
        change = _difference(block, old[begin : begin + BLOCK], item)
        if not change.any():
            yield memoryview(b"")
            continue
        packed = compressor.compress(np.ascontiguousarray(change.reshape(-1, item).T).data)
        yield memoryview(packed) if len(packed) < len(block) else block.data


def decode(stored: memoryview, length: int, old: Bytes, item: int, *, is_xor: bool = False) -> None:
    """Turn one block of the piece before, [length], into the new one, in place; `is_xor`: as earlier versions
    stored it. Raises ValueError when what is stored cannot be one."""
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
    elements = np.empty((length // item, item), np.uint8)
    for number, plane in enumerate(np.frombuffer(planes, np.uint8).reshape(item, -1)):
        elements[:, number] = plane  # twice as fast as one transposed copy
    change = elements.reshape(-1)
    if is_xor:
        np.bitwise_xor(old, change, out=old)
    else:
        _add_difference(old, change, item)


def _difference(new: Bytes, old: Bytes, item: int) -> Bytes:
    """Elements of `new` minus those of `old`, modulo 2^bits, zigzag-coded."""
    unsigned, signed = _UNSIGNED[item], _SIGNED[item]
    change: NDArray[Any] = new.view(unsigned) - old.view(unsigned)
    sign = (change.view(signed) >> (8 * item - 1)).view(unsigned)
    change <<= 1
    change ^= sign
    coded: Bytes = change.view(np.uint8)
    return coded


def _add_difference(old: Bytes, change: Bytes, item: int) -> None:
    """The reverse, in place; `change` is used up."""
    coded: NDArray[Any] = change.view(_UNSIGNED[item])
    sign = coded & 1
    np.negative(sign, out=sign)
    coded >>= 1
    coded ^= sign
    np.add(old.view(_UNSIGNED[item]), coded, out=old.view(_UNSIGNED[item]))
