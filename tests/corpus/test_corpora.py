"""A recipe's corpora from its YAML to open files: prepared, named in data.json, refused when they changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.config.data import BlendPart, DataConfig
from llmtrain.config.load import load_recipe
from llmtrain.config.model import ModelConfig
from llmtrain.config.recipe import BatchConfig, Recipe, TrainConfig
from llmtrain.corpus.corpora import open_corpora, prepare_corpora, training_samples
from llmtrain.corpus.prepared import open_prepared
from llmtrain.errors import ConfigError, CorpusError, RunError, UsageError
from llmtrain.run.data_file import CorpusPlace, DataFile, read_data_file, write_data_file
from tests.corpus.conftest import paragraph

RECIPE = Recipe(
    name="blend",
    model=ModelConfig(kind="llama", layers=1, hidden=32, heads=2, vocab=256, sequence=32),
    batch=BatchConfig(global_size=4),
    train=TrainConfig(steps=10, seed=3),
)


def silent(_):
    pass


@pytest.fixture
def texts(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        for number in range(40):
            (tmp_path / name / f"{number}.txt").write_text(name + paragraph(number) * 3)
    return tmp_path


def blend(folder, **changes):
    parts = tuple(
        BlendPart(corpus=str(folder / name), weight=weight) for name, weight in (("a", 5), ("b", 3), ("c", 2))
    )
    data = DataConfig(blend=parts, validation_fraction=0.2, validation_every=5)
    return replace(RECIPE, data=replace(data, **changes))


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("shuffle", ["windows", "documents"])
def test_a_blend_is_prepared_opened_and_read(texts, packing, shuffle):
    recipe = blend(texts, packing=packing, shuffle=shuffle)
    file, tokens = prepare_corpora(recipe, texts / "storage", progress=silent)
    again, _ = prepare_corpora(recipe, texts / "storage", progress=silent)
    assert again == file
    assert len({place.digest for place in file.corpora}) == 3
    write_data_file(texts / "data.json", file)
    assert read_data_file(texts / "data.json") == file
    corpora = open_corpora(file, recipe, texts)
    folders = [Path(place.folder) for place in file.corpora]
    assert sum(open_prepared(folder).train.tokens for folder in folders) == tokens
    samples = training_samples(corpora.train, recipe)
    for sample in range(60):
        read, (corpus, _) = samples.read(sample), samples.place(sample)
        assert len(read.tokens) == 33
        assert (read.begins is None) == (packing == "stream")
        if read.begins is not None:  # A document ends with the separator and begins after it.
            assert (read.tokens[read.begins - 1] == 0).all()
            assert (read.tokens[read.begins] == ord("abc"[corpus])).all()


def test_the_order_of_the_blend_is_part_of_its_digest(texts):
    recipe = blend(texts)
    file, _ = prepare_corpora(recipe, texts / "storage", progress=silent)
    turned = DataFile(corpora=file.corpora[::-1])
    assert turned.digest != file.digest
    assert DataFile(corpora=file.corpora[:1]).digest == file.corpora[0].digest


def test_a_corpus_that_was_prepared_anew_is_refused(texts):
    recipe = blend(texts)
    file, _ = prepare_corpora(recipe, texts / "storage", progress=silent)
    wrong = DataFile(corpora=(file.corpora[0], replace(file.corpora[1], digest="0" * 64), file.corpora[2]))
    with pytest.raises(CorpusError, match="it was prepared anew") as raised:
        open_corpora(wrong, recipe, texts)
    assert file.corpora[1].folder in raised.value.text()


def test_another_number_of_corpora_is_refused(texts):
    recipe = blend(texts)
    file, _ = prepare_corpora(recipe, texts / "storage", progress=silent)
    with pytest.raises(UsageError, match="2 were prepared for the run, the recipe names 3"):
        open_corpora(DataFile(corpora=file.corpora[:2]), recipe, texts)


def test_every_corpus_of_a_blend_must_fit(texts, tokenizer_json):
    recipe = blend(texts)
    small = replace(recipe, model=replace(recipe.model, vocab=100))
    with pytest.raises(UsageError, match=r"holds token id \d+ \(train\), but model.vocab=100"):
        prepare_corpora(small, texts / "storage", progress=silent)
    (texts / "c" / "only.txt").write_text("c")
    for path in (texts / "c").glob("[0-9]*.txt"):
        path.unlink()
    with pytest.raises(UsageError, match="too few for one window"):
        prepare_corpora(recipe, texts / "storage", progress=silent)
    one = replace(recipe, data=DataConfig(corpus=str(texts / "a"), validation_fraction=0.2))
    file, _ = prepare_corpora(one, texts / "s", progress=silent)
    given = DataConfig(
        blend=(BlendPart(corpus=file.corpora[0].folder, weight=1),), tokenizer=str(tokenizer_json)
    )
    with pytest.raises(UsageError, match="was prepared with tokenizer bytes"):
        prepare_corpora(replace(recipe, data=given), texts / "s", progress=silent)


def test_the_data_file_of_the_version_before(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"schema": 1, "folder": "/data/x", "digest": "ab"}))
    assert read_data_file(path) == DataFile(corpora=(CorpusPlace(folder="/data/x", digest="ab"),))


@pytest.mark.parametrize(
    "document",
    [
        {"schema": 2, "corpora": [], "digest": "ab"},
        {"schema": 2, "corpora": [{"folder": "/x"}], "digest": "ab"},
        {"schema": 2, "corpora": [{"folder": "/x", "digest": "ab", "order": ""}], "digest": "changed"},
        {"schema": 3},
        [],
    ],
)
def test_data_files_that_are_none(tmp_path, document):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(document))
    with pytest.raises(RunError) as raised:
        read_data_file(path)
    assert str(path) in raised.value.text()


YAML = """name: b
model: {kind: gpt, layers: 2, hidden: 32, heads: 2, vocab: 256, sequence: 64}
data:
  corpus: %s
  blend:
    - {corpus: a, weight: 0.7}
    - corpus: %s
      weight: %s
batch: {global: 8}
learning_rate: {peak: 1e-3}
train: {steps: 10}
"""


def test_a_blend_in_a_recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(YAML % ("python-stdlib", "sub/b", 0.3))
    data = load_recipe(str(path), ["data.blend.1.weight=2", "data.packing=documents"]).data
    expected = [(str(tmp_path / "a"), 0.7), (str(tmp_path / "sub" / "b"), 2)]
    assert [(part.corpus, part.weight) for part in data.blend] == expected
    assert data.packing == "documents"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("x.txt", "b", 0.3), ":4: data takes one corpus or a blend, not both"),
        (("python-stdlib", "a", 0.3), ":7: {folder}/a is in data.blend twice"),
        (("python-stdlib", "b", 1e-6), ":8: data.blend.1.weight = 1e-06 is next to nothing"),
        (("python-stdlib", "b", 0), ":8: data.blend.1.weight must be a number > 0"),
        (("python-stdlib", "''", 1), ":7: data.blend.1.corpus is empty"),
    ],
)
def test_blends_that_make_no_sense(tmp_path, values, message):
    path = tmp_path / "r.yaml"
    path.write_text(YAML % values)
    with pytest.raises(ConfigError) as raised:
        load_recipe(str(path))
    assert message.format(folder=tmp_path) in raised.value.text()
