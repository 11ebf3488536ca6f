"""`llmtrain checkpoint`, as a person and as a program see it."""

from __future__ import annotations

import json
import os

import pytest

from llmtrain.cli.main import run
from llmtrain.run.checkpoints import list_checkpoints


@pytest.fixture
def whole_run(make_checkpoint, tmp_path, monkeypatch):
    """A run `run-1` of three checkpoints below `runs/`."""
    for step in (10, 20, 30):
        make_checkpoint(step)
    path = tmp_path / "home" / "runs" / "run-1"
    path.mkdir(parents=True)
    (tmp_path / "checkpoints").rename(path / "checkpoints")
    (path / "job.json").write_text('{"run_id": "run-1"}')
    monkeypatch.chdir(tmp_path / "home")
    return path


@pytest.fixture
def damaged_run(whole_run):
    """The same, the newest checkpoint with a damaged shard, the second with a cut one."""
    shard = whole_run / "checkpoints" / "step-00000030" / "shard-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    os.truncate(whole_run / "checkpoints" / "step-00000020" / "shard-00000.safetensors", 9)
    return whole_run


def document(capsys, *arguments, code=0):
    assert run([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_list(damaged_run, capsys):
    assert run(["checkpoint", "list", "run-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "STEP", "SAMPLES", "SIZE", "SHARDS", "FILE", "TIME", "KIND", "STATE"]
    assert lines[1].startswith("step-00000030")
    assert lines[1].endswith("complete"), "a flipped bit does not show without reading"
    assert "truncated: 9 bytes" in lines[2]
    listed = document(capsys, "checkpoint", "list", "run-1")
    assert listed["schema"] == 1
    assert listed["latest"] == "step-00000030"
    assert [(entry["step"], bool(entry["problems"])) for entry in listed["checkpoints"]] == [
        (30, False),
        (20, True),
        (10, False),
    ]
    assert listed["checkpoints"][0]["consumed_samples"] == 240


def test_show(damaged_run, capsys):
    assert run(["checkpoint", "show", "run", "10", "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "samples  80" in text
    assert "in 2 shards" in text
    assert text.splitlines()[-1].split() == ["t", "U8", "16", "2"]
    shown = document(capsys, "checkpoint", "show", str(damaged_run))["checkpoint"]
    assert (shown["step"], shown["shards"], shown["tensor_list"]) == (
        30,
        2,
        {"t": {"dtype": "U8", "shape": [16]}},
    )
    assert "complete (`verify` reads every byte)" in text


def test_show_tells_of_damage_that_shows(damaged_run, capsys):
    assert run(["checkpoint", "show", "run", "20"]) == 0
    seen = capsys.readouterr()
    assert "step-00000020/shard-00000.safetensors: truncated: 9 bytes" in seen.err
    assert "state    damaged" in seen.out
    [problem] = document(capsys, "checkpoint", "show", "run", "20")["checkpoint"]["problems"]
    assert problem["message"].startswith("truncated")


def test_verify_names_every_damage_and_exits_1(damaged_run, capsys):
    assert run(["checkpoint", "verify", "run-1"]) == 1
    seen = capsys.readouterr()
    assert seen.out.splitlines() == [
        "step-00000030: damaged",
        "step-00000020: damaged",
        "step-00000010: whole",
    ]
    assert "shard-00001.safetensors: damaged: its checksum is not the manifest's" in seen.err
    assert "shard-00000.safetensors: truncated: 9 bytes" in seen.err
    verified = document(capsys, "checkpoint", "verify", "run-1", code=1)
    assert verified["newest_whole"] == "step-00000010"
    assert run(["checkpoint", "verify", "run-1", "10"]) == 0


@pytest.mark.parametrize(("is_link", "state"), [(False, "is missing"), (True, "is a symbolic link")])
def test_the_checkpoint_committed_last_is_gone(whole_run, capsys, is_link, state):
    newest, elsewhere = whole_run / "checkpoints" / "step-00000030", whole_run / "elsewhere"
    newest.rename(elsewhere)
    if is_link:
        newest.symlink_to(elsewhere)
    assert run(["checkpoint", "list", "run-1"]) == 0
    assert state in capsys.readouterr().err
    assert run(["checkpoint", "verify", "run-1"]) == 1
    assert state in capsys.readouterr().err
    [problem] = document(capsys, "checkpoint", "verify", "run-1", code=1)["problems"]
    assert problem["where"].endswith("step-00000030")


def test_verify_notices_a_checkpoint_of_another_run(damaged_run, capsys):
    (damaged_run / "job.json").write_text('{"run_id": "run-2"}')
    assert run(["checkpoint", "verify", "run-1", "10"]) == 1
    assert "is of run 'run-1', not of 'run-2'" in capsys.readouterr().err


def test_prune(whole_run, capsys):
    planned = document(capsys, "checkpoint", "prune", "run-1", "--keep", "1", "--dry-run")
    assert planned["deleted"] == ["step-00000020", "step-00000010"]
    assert len(list_checkpoints(whole_run / "checkpoints")) == 3
    spared = document(
        capsys, "checkpoint", "prune", "run-1", "--keep", "1", "--keep-every", "20", "--dry-run"
    )
    assert spared["deleted"] == ["step-00000010"]
    assert run(["checkpoint", "prune", "run-1", "--keep", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == ["deleted step-00000020", "deleted step-00000010"]
    assert [checkpoint.step for checkpoint in list_checkpoints(whole_run / "checkpoints")] == [30]


def test_prune_never_deletes_the_last_whole_one_for_one_with_flipped_bits(damaged_run, capsys):
    assert run(["checkpoint", "prune", "run-1", "--keep", "1"]) == 0
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "shard-00001.safetensors: damaged" in seen.err and "shard-00000.safetensors: truncated" in seen.err
    assert "3 kept, step-00000030, step-00000020 damaged, which count for none" in seen.err
    planned = document(capsys, "checkpoint", "prune", "run-1", "--keep", "1", "--dry-run")
    assert [entry["name"] for entry in planned["damaged"]] == ["step-00000030", "step-00000020"]
    assert [checkpoint.step for checkpoint in list_checkpoints(damaged_run / "checkpoints")] == [30, 20, 10]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["list", "rum-1"], 2, "no run named 'rum-1' below runs/\n  hint: did you mean run-1?"),
        (["list", "./nothing"], 2, "no such folder: nothing"),
        (["list", "."], 2, ". is not a run folder: it has no job.json"),
        (["list", "run-1", "--runs", "other"], 2, "there is no run below other/"),
        (["show", "run-1", "11"], 2, "there is no checkpoint of step 11\n  hint: steps saved: 30, 20, 10"),
        (["verify", "run-1", "11"], 2, "there is no checkpoint of step 11\n  hint: steps saved: 30, 20, 10"),
        (["show", "run-1", "x"], 2, "'x' is not a whole number"),
        (["prune", "run-1"], 2, "missing option '--keep'"),
        (["prune", "run-1", "--keep", "0"], 2, "0 is not >= 1"),
    ],
)
def test_wrong_calls(damaged_run, capsys, arguments, code, message):
    assert run(["checkpoint", *arguments]) == code
    assert message in capsys.readouterr().err


def test_a_run_without_checkpoints(damaged_run, capsys):
    import shutil

    shutil.rmtree(damaged_run / "checkpoints")
    assert run(["checkpoint", "list", "run-1"]) == 0
    assert "there is no checkpoint in" in capsys.readouterr().err
    assert document(capsys, "checkpoint", "list", "run-1")["checkpoints"] == []
    assert run(["checkpoint", "verify", "run-1"]) == 1
    assert run(["checkpoint", "show", "run-1"]) == 1
