"""Compressed input as a plain stream that notices when it was cut off."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from llmtrain.errors import UsageError

CHUNK = 1 << 17


class TornError(OSError):
    """A compressed file ends in the middle or is not what its name says."""


def open_input(path: Path, compression: str) -> BinaryIO:
    """Open a file for reading, decompressed; `compression` is "", "gz" or "zst".

    Reading raises OSError for a torn file. Raises UsageError when the package for zstd is not installed.
    """
    if compression == "gz":
        return io.BufferedReader(_Gzip(path), CHUNK)
    if compression == "zst":
        return io.BufferedReader(_Zstd(path), CHUNK)
    return path.open("rb")


def needs_package(path: Path, package: str) -> UsageError:
    """The error for an input whose reader is an optional package."""
    return UsageError(
        f"needs the package {package}", where=str(path), hint="install it with `pip install 'llmtrain[data]'`"
    )


class _Gzip(io.RawIOBase):
    """gzip whose faults are all OSErrors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._stream = gzip.GzipFile(path, "rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._stream.read1(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TornError(0, f"is not a whole gzip file: {error}") from error
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Zstd(io.RawIOBase):
    """All frames of a zstd file, one after the other."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            import zstandard
        except ImportError as error:
            raise needs_package(path, "zstandard") from error
        self._library = zstandard
        self._stream = path.open("rb")
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _fill(self) -> bool:
        """Decompress one more chunk; False at the end of the file."""
        content = self._stream.read(CHUNK)
        if not content:
            if self._frame is not None:
                raise TornError(0, "is not a whole zstd file: it ends inside a frame")
            return False
        parts: list[bytes] = []
        try:
            while content:
                if self._frame is None:
                    self._frame = self._library.ZstdDecompressor().decompressobj()
                parts.append(self._frame.decompress(content))
                content = b""
                if self._frame.eof:
                    content, self._frame = self._frame.unused_data, None
        except self._library.ZstdError as error:
            raise TornError(0, f"is not a whole zstd file: {error}") from error
        self._ready = memoryview(b"".join(parts))
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()
