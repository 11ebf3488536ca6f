"""Documents of a parquet file: the column `text`, through the optional package pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.corpus.preparation.compression import needs_package
from llmtrain.corpus.preparation.sources import unreadable
from llmtrain.errors import InputError, UsageError

COLUMN = "text"
BATCH_ROWS = 256


def read_column(path: Path, begin: int, end: int) -> Iterator[str]:
    """Texts of the row groups that begin in bytes [begin, end); a null is an empty text.

    Raises UsageError without the package or the column, InputError for a damaged file, CorpusError when the
    disk fails.
    """
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise needs_package(path, "pyarrow") from error
    try:
        with parquet.ParquetFile(path, memory_map=False) as file:
            kind = _column_type(path, file)
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise UsageError(f"column {COLUMN!r} holds {kind}, not text", where=str(path))
            groups = [group for group, place in enumerate(_places(file)) if begin <= place < end]
            if not groups:
                return
            for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=[COLUMN]):
                yield from (value.as_py() or "" for value in batch.column(0))
    except OSError as error:
        # Its reader tells of damaged pages with an OSError that has no number.
        if error.errno is not None:
            raise unreadable(path, error) from error
        raise _torn(path, error) from error
    except arrow.ArrowException as error:
        raise _torn(path, error) from error


def _torn(path: Path, error: Exception) -> InputError:
    return InputError(f"is not a whole parquet file: {str(error)[:200]}", where=str(path))


def _column_type(path: Path, file: Any) -> Any:
    schema = file.schema_arrow
    if COLUMN not in schema.names:
        raise UsageError(
            f"has no column {COLUMN!r}", where=str(path), hint=f"columns: {', '.join(schema.names)}"
        )
    return schema.field(COLUMN).type


def _places(file: Any) -> Iterator[int]:
    """First byte of every row group."""
    for group in range(file.metadata.num_row_groups):
        column = file.metadata.row_group(group).column(0)
        pages = (column.dictionary_page_offset, column.data_page_offset)
        yield min(place for place in pages if place is not None)
