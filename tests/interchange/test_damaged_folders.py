"""Hugging Face folders that are damaged, hostile or of another model: each is named, none is followed."""

from __future__ import annotations

import json

import pytest

from llmtrain.errors import CheckpointError, ConfigError, UsageError
from llmtrain.run.interchange.export import export_huggingface
from llmtrain.run.interchange.importing import import_huggingface
from tests.interchange.test_huggingface import INFO, save_random
from tests.support.engine_cases import llama

pytestmark = pytest.mark.engine


def exported(tmp_path):
    folder = tmp_path / "hf"
    export_huggingface(
        save_random(tmp_path / "checkpoints", llama()).path, folder, llama(), file_bytes=40_000
    )
    return folder


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def set_header(folder, change):
    path = sorted(folder.glob("model-*"))[0]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header["model.embed_tokens.weight"])
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


DAMAGES = {
    "file outside": (
        lambda f: edit_index(f, lambda d: d["weight_map"].update({"x": "../../etc/passwd.safetensors"})),
        "names the file '../../etc/passwd.safetensors', which is not followed",
    ),
    "no weight_map": (
        lambda f: edit_index(f, lambda d: d.pop("weight_map")),
        "is not an index with a weight_map",
    ),
    "missing file": (lambda f: sorted(f.glob("model-*"))[0].unlink(), "cannot be read: No such file"),
    "cut file": (lambda f: cut(sorted(f.glob("model-*"))[0], 2000), "does not lie inside the file"),
    "empty file": (
        lambda f: cut(sorted(f.glob("model-*"))[0], 0),
        "is not a safetensors file, or was cut off",
    ),
    "garbage": (
        lambda f: sorted(f.glob("model-*"))[0].write_bytes(b"\x10" + bytes(7) + b"x" * 64),
        "damaged header",
    ),
    "huge header": (
        lambda f: sorted(f.glob("model-*"))[0].write_bytes(b"\xff" * 100),
        "is not a safetensors file",
    ),
    "offsets outside": (
        lambda f: set_header(f, lambda e: e.update(data_offsets=[0, 1 << 40])),
        "does not lie inside the file",
    ),
    "negative shape": (
        lambda f: set_header(f, lambda e: e.update(shape=[-96, -48])),
        "does not lie inside the file",
    ),
    "integers": (lambda f: set_header(f, lambda e: e.update(dtype="I32")), "is 'I32', not a float format"),
    "pickle only": (
        lambda f: ([p.unlink() for p in f.iterdir()], (f / "pytorch_model.bin").write_bytes(b"x")),
        "pickle files (pytorch_model.bin), which are never loaded",
    ),
    "nothing": (lambda f: [p.unlink() for p in f.iterdir()], "has neither model.safetensors nor"),
}


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_named(tmp_path, name):
    damage, message = DAMAGES[name]
    folder = exported(tmp_path)
    damage(folder)
    with pytest.raises((CheckpointError, UsageError)) as raised:
        import_huggingface(folder, tmp_path / "in", llama(), INFO)
    assert message in raised.value.text()
    assert not list((tmp_path / "in").glob("step-????????"))


def test_every_tensor_that_does_not_fit_is_named(tmp_path):
    with pytest.raises(ConfigError) as raised:
        import_huggingface(exported(tmp_path), tmp_path / "in", llama(layers=5, ffn_hidden=80), INFO)
    text = raised.value.text()
    assert "tensor 'model.layers.4.self_attn.q_proj.weight' is missing" in text
    assert (
        "tensor 'model.layers.0.mlp.up_proj.weight' has shape [64, 48], the recipe's model needs [80, 48]"
        in text
    )
    with pytest.raises(ConfigError) as raised:
        import_huggingface(tmp_path / "hf", tmp_path / "in", llama(layers=3), INFO)
    assert (
        "tensor 'model.layers.3.input_layernorm.weight' has no place in the recipe's model"
        in raised.value.text()
    )
