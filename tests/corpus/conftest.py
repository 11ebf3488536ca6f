"""Small inputs of every kind, and a real tokenizer.json trained on the spot."""

from __future__ import annotations

import json

import pytest

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda")


def paragraph(number):
    """A text that is different for every number."""
    return " ".join(WORDS[(number * step) % len(WORDS)] + str(number) for step in range(1, 9))


@pytest.fixture
def jsonl(tmp_path):
    """300 documents in `lines.jsonl`."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": paragraph(n), "id": n}) + "\n" for n in range(300)))
    return path


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory):
    """A byte-level BPE tokenizer of 300 tokens with `<|endoftext|>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((paragraph(n) for n in range(100)), trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
