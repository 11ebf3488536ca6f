"""Text to token ids: the built-in byte tokenizer, and Hugging Face `tokenizer.json` files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmtrain.corpus.prepared import TokenizerInfo
from llmtrain.errors import UsageError
from llmtrain.resources import user_path

SEPARATOR_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|im_end|>",
    "[SEP]",
)
"""Names under which tokenizers are known to keep their end-of-text token."""


class Tokenizer(Protocol):
    """What preparing a corpus needs of a tokenizer."""

    info: TokenizerInfo

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Token ids of every text, without special tokens and without separator."""


class ByteTokenizer:
    """One token a UTF-8 byte; 0 separates documents, and a 0 inside a text is left out."""

    info = TokenizerInfo(
        name="bytes", digest=hashlib.sha256(b"llmtrain bytes 1").hexdigest(), vocab=256, separator=0
    )

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Token ids [bytes] of every text."""
        return [np.frombuffer(text.replace("\0", "").encode("utf-8", "replace"), np.uint8) for text in texts]


class HuggingFaceTokenizer:
    """A `tokenizer.json`, through the `tokenizers` package, which is imported here and nowhere else."""

    def __init__(self, path: Path) -> None:
        """Read the file; raises UsageError when it is missing, no tokenizer, or has no end-of-text token."""
        from tokenizers import Tokenizer as Library

        try:
            content = path.read_bytes()
            self._library = Library.from_str(content.decode("utf-8"))
        except OSError as error:
            raise UsageError(
                f"cannot read the tokenizer: {error.strerror}",
                where=str(path),
                hint="data.tokenizer is `bytes` or the path of a Hugging Face tokenizer.json",
            ) from error
        except Exception as error:  # the library raises plain Exception
            raise UsageError(f"is not a tokenizer.json: {str(error)[:200]}", where=str(path)) from error
        self._library.no_truncation()
        self._library.no_padding()
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        separator = vocabulary[_separator(path, vocabulary)]
        digest = hashlib.sha256(content + f"\n{separator}".encode()).hexdigest()
        vocab = max(vocabulary.values()) + 1
        self.info = TokenizerInfo(name=str(path), digest=digest, vocab=vocab, separator=separator)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Token ids of every text; the library uses all cores unless TOKENIZERS_PARALLELISM=false."""
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


def load_tokenizer(reference: str) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names: `bytes`, a tokenizer.json or a folder with one.

    Raises UsageError.
    """
    if reference == "bytes":
        return ByteTokenizer()
    path = user_path(reference)
    return HuggingFaceTokenizer(path / "tokenizer.json" if path.is_dir() else path)


def _separator(path: Path, vocabulary: dict[str, int]) -> str:
    """Name of the token between documents: `eos_token` of the tokenizer_config.json beside it, else a known
    name."""
    config = path.with_name("tokenizer_config.json")
    if config.is_file():
        try:
            named = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise UsageError(f"cannot be read: {error}", where=str(config)) from error
        if isinstance(named, dict):
            named = named.get("content")
        if named is not None and named not in vocabulary:
            raise UsageError(
                f"eos_token {named!r} is not in the vocabulary of {path.name}", where=str(config)
            )
        if isinstance(named, str):
            return named
    for name in SEPARATOR_NAMES:
        if name in vocabulary:
            return name
    raise UsageError(
        f"has no end-of-text token to separate documents (known names: {', '.join(SEPARATOR_NAMES)})",
        where=str(path),
        hint=f'put {{"eos_token": "..."}} into {config}',
    )
