"""A prepared corpus: the folder that `prepare` writes and that ranks read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.codec import canonical_json, from_json, to_json
from llmtrain.corpus.token_file import TokenFile
from llmtrain.errors import ConfigError, CorpusError, UsageError

SCHEMA = 1
MANIFEST = "corpus.json"
TRAIN = "train"
VALIDATION = "validation"
CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerInfo:
    """Which tokenizer made the tokens."""

    name: str
    """As given: `bytes` or a path."""
    digest: str
    """SHA-256 of all that decides the tokens."""
    vocab: int
    """Token ids are below it."""
    separator: int
    """Token after every document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceInfo:
    """One source as given, with what was found in it."""

    source: str
    files: int
    bytes: int
    digest: str
    """SHA-256 over names and contents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitInfo:
    """One token file."""

    tokens: int
    documents: int
    dtype: str
    max_token: int
    """Largest token id; -1 when there is none."""
    bin_sha256: str
    """Of the whole file, also when this split is a part of it."""
    idx_sha256: str
    prefix: str = ""
    """Absolute path, without suffix, of a corpus that is used where it lies; "": in this folder."""
    first_document: int = 0
    """First document of the file that belongs to this split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusManifest:
    """What `corpus.json` holds, besides `schema` and `digest`."""

    address: str
    """Digest of everything that decides the content: sources, tokenizer, split."""
    tokenizer: TokenizerInfo
    validation_fraction: float
    sources: tuple[SourceInfo, ...]
    empty_documents: int
    """Documents without text, left out."""
    undecodable_files: int
    """Text files with bytes that are not UTF-8; each such byte became U+FFFD."""
    train: SplitInfo
    validation: SplitInfo


@dataclass(frozen=True, slots=True)
class PreparedCorpus:
    """An open prepared corpus."""

    folder: Path
    manifest: CorpusManifest
    digest: str
    """Identity of the data: SHA-256 over tokenizer and token files, wherever they lie and come from."""
    train: TokenFile
    validation: TokenFile
    """Has no token when nothing was held out."""

    @property
    def vocab(self) -> int:
        """Size of the tokenizer's vocabulary."""
        return self.manifest.tokenizer.vocab

    def check_fits(self, *, vocab: int, sequence: int, validation: bool) -> None:
        """Raise UsageError when a model cannot train on it: token ids >= vocab, or less than one window of a
        split."""
        splits = [(TRAIN, self.train, self.manifest.train)]
        if validation:
            splits.append((VALIDATION, self.validation, self.manifest.validation))
        for name, tokens, info in splits:
            if info.max_token >= vocab:
                raise UsageError(
                    f"holds token id {info.max_token} ({name}), but model.vocab={vocab}",
                    where=str(self.folder),
                    hint=f"set model.vocab to at least {self.vocab}",
                )
            if not tokens.windows(sequence):
                hint = (
                    "data.validation_fraction (of a prepared folder: prepare it with a larger "
                    "--validation-fraction), or set data.validation_every=0"
                    if name == VALIDATION
                    else "data.corpus"
                )
                raise UsageError(
                    f"has {tokens.tokens} {name} tokens, too few for one window of {sequence} + 1",
                    where=str(self.folder),
                    hint=f"use a larger {hint}",
                )

    def close(self) -> None:
        """Close both token files."""
        self.train.close()
        self.validation.close()

    def verify(self) -> None:
        """Read everything and compare with the manifest's digests; raises CorpusError."""
        splits = ((self.train, self.manifest.train), (self.validation, self.manifest.validation))
        digests = {tokens.path: info.bin_sha256 for tokens, info in splits}
        digests |= {tokens.path.with_suffix(".idx"): info.idx_sha256 for tokens, info in splits}
        for path, digest in digests.items():
            if file_sha256(path) != digest:
                raise CorpusError(
                    "is damaged: its SHA-256 is not the manifest's",
                    where=str(path),
                    hint="prepare the corpus again",
                )


def is_prepared(folder: Path) -> bool:
    """Whether a folder looks like one that `prepare` wrote."""
    return (folder / MANIFEST).is_file()


def open_prepared(folder: Path, *, digest: str = "") -> PreparedCorpus:
    """Open a prepared corpus and check manifest, dtypes and lengths, without reading the tokens.

    `digest` is the one that a run was started with. Raises CorpusError.
    """
    manifest, found = read_manifest(folder / MANIFEST)
    if digest and found != digest:
        raise CorpusError(
            f"has digest {found[:16]}, but the run was started with {digest[:16]}: it was prepared anew",
            where=str(folder),
        )
    train, validation = (_open_split(folder, name, getattr(manifest, name)) for name in (TRAIN, VALIDATION))
    return PreparedCorpus(folder, manifest, found, train, validation)


def read_manifest(path: Path) -> tuple[CorpusManifest, str]:
    """Return a checked manifest and its digest; raises CorpusError."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CorpusError(
            "missing: this is not a prepared corpus", where=str(path), hint="run `llmtrain data prepare`"
        ) from error
    except (OSError, ValueError) as error:
        raise CorpusError(f"cannot be read: {error}", where=str(path)) from error
    if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
        raise CorpusError(f"is not a corpus manifest of schema {SCHEMA}", where=str(path))
    if document.pop("checksum", None) != _sha256(document):
        raise CorpusError("was changed or damaged: its checksum does not match", where=str(path))
    document.pop("digest", None)
    try:
        manifest = from_json(CorpusManifest, document, str(path))
    except ConfigError as error:
        raise CorpusError(
            f"is not a corpus manifest: {error.problems[0].message}", where=str(path)
        ) from error
    return manifest, corpus_digest(manifest)


def manifest_document(manifest: CorpusManifest) -> dict[str, Any]:
    """Return what `corpus.json` holds."""
    body = {"digest": corpus_digest(manifest), **to_json(manifest)}
    return {"schema": SCHEMA, "checksum": _sha256(body), **body}


def corpus_digest(manifest: CorpusManifest) -> str:
    """Identity of the data: what decides which tokens a rank sees, not where they lie or come from."""
    tokenizer = to_json(manifest.tokenizer)
    del tokenizer["name"]
    splits = {name: to_json(getattr(manifest, name)) for name in (TRAIN, VALIDATION)}
    for split in splits.values():
        del split["prefix"]
    return _sha256({"tokenizer": tokenizer, **splits})


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in bounded memory; raises CorpusError."""
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as stream:
            while block := stream.read(CHUNK):
                digest.update(block)
    except OSError as error:
        raise CorpusError(f"cannot be read: {error.strerror}", where=str(path)) from error
    return digest.hexdigest()


def _open_split(folder: Path, name: str, info: SplitInfo) -> TokenFile:
    path = Path(info.prefix) if info.prefix else folder / name
    tokens = TokenFile.open(path, info.first_document, info.documents)
    stored = tokens.documents if info.prefix else tokens.head.documents
    if (tokens.tokens, stored, tokens.dtype.name) != (info.tokens, info.documents, info.dtype):
        tokens.close()
        raise CorpusError(
            "does not match corpus.json: tokens, documents or dtype differ", where=str(tokens.path)
        )
    return tokens


def _sha256(body: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(body).encode("ascii")).hexdigest()
