"""The recipe's data: which corpora, in which proportions, and how their tokens become samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from llmtrain.config.fields import Fraction, NaturalInt, PositiveFloat, PositiveInt, RelativeTo

Corpus = Annotated[str, RelativeTo(keywords=("python-stdlib",))]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendPart:
    """One corpus of a blend."""

    corpus: Corpus
    """As `data.corpus`."""
    weight: PositiveFloat
    """Share of the samples, relative to the other weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    corpus: Corpus = "python-stdlib"
    """`python-stdlib` (the standard library's own source files), a text or jsonl file, a folder, or a folder
    that `llmtrain data prepare` wrote.
    """
    blend: tuple[BlendPart, ...] = ()
    """Several corpora instead of one, each with its weight; each is read to its end again and again."""
    tokenizer: Annotated[str, RelativeTo(keywords=("bytes",))] = "bytes"
    """`bytes` or the path of a Hugging Face `tokenizer.json`."""
    packing: Literal["stream", "documents"] = "stream"
    """`stream`: a sample is a run of tokens, whatever its documents. `documents`: tokens attend within their
    own document only, positions begin anew with each, and no token is predicted from another document.
    """
    shuffle: Literal["windows", "documents"] = "windows"
    """`windows`: neighbouring documents of the corpus stay neighbours inside a sample. `documents`: their
    order is drawn from the seed too, before the tokens are cut into samples.
    """
    validation_fraction: Fraction = 0.01
    """Share of documents held out, chosen by hash."""
    validation_every: NaturalInt = 50
    """Steps between two validations; 0 switches validation off."""
    validation_sequences: PositiveInt = 32
    """Sequences in one validation pass, always the same ones."""

    @property
    def parts(self) -> tuple[BlendPart, ...]:
        """The blend; of one corpus, where none is given."""
        return self.blend or (BlendPart(corpus=self.corpus, weight=1.0),)

    def corpora(self) -> Iterator[tuple[str, str]]:
        """Dotted field and name of every corpus."""
        if not self.blend:
            yield "data.corpus", self.corpus
        for index, part in enumerate(self.blend):
            yield f"data.blend.{index}.corpus", part.corpus
