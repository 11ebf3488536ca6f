"""Training a byte-level BPE tokenizer on sources, through the `tokenizers` package."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from llmtrain.corpus.preparation.documents import read_sections
from llmtrain.corpus.preparation.parts import split_of
from llmtrain.corpus.preparation.sources import FileRange, find_files
from llmtrain.corpus.prepared import TRAIN
from llmtrain.errors import CorpusError, UsageError, is_misnamed
from llmtrain.run.atomic import write_atomic

SEPARATOR = "<|endoftext|>"
SMALLEST_VOCAB = 257
"""All bytes and the separator."""
BATCH = 256


def train_tokenizer(
    sources: Sequence[str],
    folder: Path,
    *,
    vocab: int,
    validation_fraction: float = 0.01,
    most_bytes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`; return the vocabulary's size.

    Every text can be encoded and decoded without loss. Held-out texts are left out, as `data prepare` leaves
    them out with the same fraction. `most_bytes` limits the text that is read, evenly over the files. Calls
    `progress(done, total)` with input bytes. Raises UsageError, CorpusError.
    """
    if vocab < SMALLEST_VOCAB:
        raise UsageError(f"a byte-level vocabulary has at least {SMALLEST_VOCAB} tokens, not {vocab}")
    ranges = _ranges(sources, most_bytes)
    library = _trained(_texts(ranges, validation_fraction, progress), vocab)
    size = int(library.get_vocab_size(with_added_tokens=True))
    if size == SMALLEST_VOCAB < vocab:
        raise UsageError("holds too little text to learn a single merge", where=", ".join(sources))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SEPARATOR,
        "model_max_length": 1 << 30,
        "clean_up_tokenization_spaces": False,
    }
    try:
        write_atomic(folder / "tokenizer.json", library.to_str(pretty=True))
        write_atomic(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    except OSError as error:
        kind = UsageError if is_misnamed(error) else CorpusError
        raise kind(f"cannot be written: {error.strerror}", where=str(folder)) from error
    return size


def _trained(texts: Iterator[list[str]], vocab: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return library


def _ranges(sources: Sequence[str], most_bytes: int | None) -> list[FileRange]:
    """The beginning of every file, in proportion, when the text is limited."""
    files = [file for source in sources for file in find_files(source)]
    total = sum(file.size for file in files)
    share = 1.0 if most_bytes is None or not total else min(1.0, most_bytes / total)
    return [FileRange(file, 0, ceil(file.size * share)) for file in files]


def _texts(
    ranges: Sequence[FileRange], validation_fraction: float, progress: Callable[[int, int], None]
) -> Iterator[list[str]]:
    total = sum(part.end for part in ranges)
    done = 0
    batch: list[str] = []
    for part in ranges:
        for section in read_sections(part):
            if section.text and split_of(section.text, validation_fraction) == TRAIN:
                batch.append(section.text)
            if len(batch) >= BATCH:
                yield batch
                batch = []
        done += part.end
        progress(done, total)
    yield batch
