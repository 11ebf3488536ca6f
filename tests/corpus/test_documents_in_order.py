"""Document bounds by look-up, and corpora whose documents are read in a drawn order."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.corpus import document_index
from llmtrain.corpus.document_index import DocumentIndex, DocumentTokens, TokenFileBounds
from llmtrain.corpus.document_order import ShuffledDocuments, make_order, order_path
from llmtrain.corpus.sampling import SampleOrder, shuffled
from llmtrain.corpus.token_file import CODES, HEAD, MAGIC, TokenFile
from llmtrain.errors import CorpusError


def write_corpus(prefix, documents):
    """An indexed corpus by hand; a document is a list of sequences, a sequence a list of tokens."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    bounds = np.cumsum([0, *(len(document) for document in documents)]).astype("<i8")
    flat = [token for sequence in sequences for token in sequence]
    prefix.with_suffix(".bin").write_bytes(np.array(flat, "<u2").tobytes())
    head = HEAD.pack(MAGIC, 1, CODES["uint16"], len(sequences), len(bounds))
    body = lengths.tobytes() + pointers.astype("<i8").tobytes() + bounds.tobytes()
    prefix.with_suffix(".idx").write_bytes(head + body)
    return TokenFile.open(prefix)


documents_of_any_shape = st.lists(
    st.lists(st.integers(0, 9).map(lambda length: list(range(length))), max_size=4), min_size=1, max_size=60
).filter(lambda documents: sum(len(sequence) for document in documents for sequence in document) > 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("documents")


@settings(max_examples=60, deadline=None)
@given(documents=documents_of_any_shape, kept=st.integers(1, 70), sequence=st.integers(1, 12))
def test_bounds_are_those_of_the_whole_index(folder, documents, kept, sequence):
    """However few of them are kept in memory; documents may be empty or longer than a window."""
    tokens = write_corpus(folder / "bounds", documents)
    ends = np.cumsum([0, *(sum(map(len, document)) for document in documents)])
    assert tokens.document_bounds().tolist() == ends.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_index, "KEPT", kept)
        seen = DocumentTokens(tokens)
    for window in range(tokens.windows(sequence)):
        first = window * sequence
        expected = sorted({int(end) - first for end in ends if first < end <= first + sequence})
        expected = [place for place in expected if first + place < tokens.tokens]
        found = [place for place in seen.begins(window, sequence).tolist() if first + place < tokens.tokens]
        assert found == expected
    tokens.close()


@settings(max_examples=60, deadline=None)
@given(documents=documents_of_any_shape, seed=st.integers(0, 2**32), sequence=st.integers(1, 12))
def test_shuffled_documents_are_the_same_documents(folder, documents, seed, sequence):
    numbered = [
        [[(at * 10 + token) % 60000 for token in part] for part in document]
        for at, document in enumerate(documents)
    ]
    tokens = write_corpus(folder / "order", numbered)
    path = folder / f"{seed}.ends"
    path.unlink(missing_ok=True)
    make_order(tokens, path, seed)
    order = SampleOrder(len(documents), seed)
    expected = [
        token for place in range(len(documents)) for part in numbered[order.window(place)] for token in part
    ]
    seen = ShuffledDocuments(tokens, path, seed)
    assert seen.windows(sequence) == (len(expected) - 1) // sequence
    lengths = [sum(map(len, numbered[order.window(place)])) for place in range(len(documents))]
    starts = np.cumsum([0, *lengths])
    for window in range(seen.windows(sequence)):
        first = window * sequence
        assert seen.window(window, sequence).tolist() == expected[first : first + sequence + 1]
        inside = {int(start) - first for start in starts if first < start <= first + sequence}
        inside = {place for place in inside if first + place < len(expected)}
        found = {place for place in seen.begins(window, sequence).tolist() if first + place < len(expected)}
        assert found == inside
    tokens.close()
    path.unlink()


@given(count=st.integers(1, 5000), seed=st.integers(0, 2**64))
@settings(max_examples=30, deadline=None)
def test_many_places_at_once_are_the_same_as_one_by_one(count, seed):
    order = SampleOrder(count, seed)
    assert shuffled(np.arange(count), count, seed).tolist() == [order.window(place) for place in range(count)]


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "c", [[[n] * (n % 7 + 1)] for n in range(500)])


def test_an_order_is_made_once_and_whole_or_not_at_all(corpus, tmp_path, monkeypatch):
    path = order_path(tmp_path / "orders", "ab" * 32, 7)
    make_order(corpus, path, 7)
    before = path.stat()
    make_order(corpus, path, 7)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    path.write_bytes(path.read_bytes()[:-8])  # Torn by somebody else: made again.
    make_order(corpus, path, 7)
    assert path.stat().st_size == before.st_size
    path.unlink()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CorpusError, match="cannot be written: No space left"):
        make_order(corpus, path, 7)
    assert list(path.parent.iterdir()) == []


def test_a_missing_or_foreign_order_is_named(corpus, tmp_path):
    path = tmp_path / "o.ends"
    with pytest.raises(CorpusError) as raised:
        ShuffledDocuments(corpus, path, 7)
    assert str(path) in raised.value.text()
    make_order(corpus, path, 7)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorpusError, match="is not the order of 500 documents"):
        ShuffledDocuments(corpus, path, 7)
    path.unlink()
    make_order(corpus, path, 7)
    other = ShuffledDocuments(corpus, path, 8)
    with pytest.raises(CorpusError, match="is the order of another corpus"):
        [other.window(window, 8) for window in range(other.windows(8))]


def test_an_index_cut_off_while_it_is_used(corpus):
    """An error with its name, not a dead process."""
    bounds = TokenFileBounds(corpus)
    index = corpus.path.with_suffix(".idx")
    with index.open("r+b") as stream:
        stream.truncate(index.stat().st_size // 2)
    with pytest.raises(CorpusError) as raised:
        DocumentIndex(bounds)
    assert str(index) in raised.value.text()


def test_bounds_that_go_backwards(tmp_path):
    corpus = write_corpus(tmp_path / "c", [[[1, 2]], [[3]], [[4, 5, 6]]])
    index = corpus.path.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    content[-16:-8] = (9).to_bytes(8, "little")
    index.write_bytes(bytes(content))
    with pytest.raises(CorpusError, match="document bounds outside its sequences"):
        DocumentIndex(TokenFileBounds(TokenFile.open(tmp_path / "c")))
