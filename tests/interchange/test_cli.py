"""`llmtrain checkpoint export` and `import`, from the command line."""

from __future__ import annotations

import dataclasses
import json

import pytest
from safetensors.numpy import load_file

from llmtrain.cli.main import run
from llmtrain.cli.subcommands.interchange import _tokenizer
from llmtrain.corpus.preparation.prepare import prepare_folder
from llmtrain.corpus.prepared import manifest_document
from llmtrain.run.checkpoints import list_checkpoints
from llmtrain.run.data_file import CorpusPlace, DataFile, write_data_file
from llmtrain.run.layout import RunDir
from tests.interchange.test_huggingface import save_random
from tests.support.engine_cases import llama

pytestmark = pytest.mark.engine

RECIPE = """
name: imported
model: {from: hf/config.json}
batch: {global: 4, micro: 1}
parallel: {dp: 1, tp: 1, pp: 1}
train: {steps: 6}
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working directory with a recipe and a Hugging Face folder `hf` of its model."""
    from llmtrain.run.interchange.export import export_huggingface

    monkeypatch.chdir(tmp_path)
    saved = save_random(tmp_path / "elsewhere", llama(vocab=256))
    export_huggingface(saved.path, tmp_path / "hf", llama(vocab=256))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def imported(home, capsys):
    assert run(["checkpoint", "import", "hf", "recipe.yaml", "--run-dir", str(home / "mine"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["imported"] == "hf"
    return RunDir(home / "mine")


def test_there_and_back(home, capsys):
    made = imported(home, capsys)
    assert [checkpoint.name for checkpoint in list_checkpoints(made.checkpoints)] == ["step-00000000"]
    assert run(["checkpoint", "verify", "./mine"]) == 0
    capsys.readouterr()
    assert run(["checkpoint", "export", "./mine", "--out", "back", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["export"]
    assert told == {"path": "back", "architecture": "LlamaForCausalLM", "step": 0, "dtype": "float32"}
    first, second = (load_file(home / name / "model.safetensors") for name in ("hf", "back"))
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first)
    assert run(["checkpoint", "export", "./mine", "0", "--out", "half", "--dtype", "bfloat16"]) == 0
    seen = capsys.readouterr()
    assert seen.out == "half: LlamaForCausalLM, step 0, bfloat16\n"
    assert "no tokenizer files: the corpus that would tell" in seen.err and "(mine/data.json: m" in seen.err


def test_why_an_export_has_no_tokenizer(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("some words\n" * 200)
    made = RunDir(tmp_path / "run")
    corpus = prepare_folder([str(text)], tmp_path / "corpus")
    write_data_file(made.data_json, DataFile(corpora=(CorpusPlace(folder=str(corpus.folder), digest=""),)))
    assert _tokenizer(made)[::2] == (
        None,
        "the built-in byte tokenizer has none (token ids are bytes of UTF-8)",
    )
    named = dataclasses.replace(corpus.manifest.tokenizer, name=str(tmp_path / "gone.json"))
    document = manifest_document(dataclasses.replace(corpus.manifest, tokenizer=named))
    (corpus.folder / "corpus.json").write_text(json.dumps(document))
    assert _tokenizer(made)[::2] == (None, f"the run's tokenizer is gone: {tmp_path}/gone.json")
    (tmp_path / "gone.json").write_text("{}")
    assert _tokenizer(made)[::2] == (tmp_path / "gone.json", "")


def test_a_damaged_checkpoint_is_not_exported(home, capsys):
    made = imported(home, capsys)
    shard = list_checkpoints(made.checkpoints)[0].path / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    for call in (["./mine"], ["./mine", "0"]):
        assert run(["checkpoint", "export", *call, "--out", "back"]) == 1
        assert "damaged: its checksum" in capsys.readouterr().err
    assert not (home / "back").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["import", "nothing", "recipe.yaml"], 2, "nothing: has neither model.safetensors nor"),
        (
            ["import", "hf", "recipe.yaml", "--set", "model.layers=5"],
            2,
            "model.layers.4.mlp.up_proj.weight' is missing",
        ),
        (["import", "hf"], 2, "missing argument 'RECIPE'"),
        (["export", "nothing", "--out", "x"], 2, "no run named 'nothing'"),
        (["export", "nothing"], 2, "missing option '--out'"),
        (["export", "nothing", "--out", "x", "--to", "onnx"], 2, "'onnx' is not one of 'hf'"),
    ],
)
def test_wrong_calls(home, capsys, arguments, code, message):
    assert run(["checkpoint", *arguments]) == code
    assert message in capsys.readouterr().err
    assert not list((home / "runs").glob("*")), "no half-made run is left"
