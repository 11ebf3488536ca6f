"""Do the files that a recipe's `data` names exist? Looks at names only and imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.config.data import DataConfig
from llmtrain.errors import Problem
from llmtrain.resources import user_path

GIVEN = (
    "a corpus is `python-stdlib`, a text, jsonl or parquet file, a folder of such, a Megatron-LM prefix "
    "(PREFIX of PREFIX.bin and PREFIX.idx), or as data.corpus of a recipe a prepared folder"
)
"""What can be given, for who gave something else."""


def missing_files(data: DataConfig) -> Iterator[Problem]:
    """Corpus and tokenizer that are not on this machine; places are dotted fields."""
    tokenizer = data.tokenizer
    for field, corpus in data.corpora():
        if corpus != "python-stdlib" and not _exists(corpus) and not _is_prefix(corpus):
            yield Problem(field, f"no such file or folder: {corpus}", GIVEN)
    if tokenizer != "bytes" and not _exists(tokenizer):
        hint = "a tokenizer is `bytes`, a Hugging Face tokenizer.json, or a folder with one"
        yield Problem("data.tokenizer", f"no such file or folder: {tokenizer}", hint)


def _is_prefix(corpus: str) -> bool:
    """Whether it is the prefix of a Megatron-LM corpus, which is no file itself."""
    return all(_exists(corpus + suffix) for suffix in (".bin", ".idx"))


def _exists(path: str) -> bool:
    try:
        return user_path(path).exists()
    except OSError:  # It may be there; who opens it says what is wrong.
        return True
