"""What a tracker is told: every step once, over attempts and calls; read back from W&B's own files."""

import json
import struct
from pathlib import Path

import pytest

from llmtrain.cli.main import run as run_command
from llmtrain.events import schema
from llmtrain.observe.trackers.tracker import Row, rows
from tests.support.run_folder import write_attempt
from tests.support.sample_events import START, attempt_files, event, step_finished
from tests.support.stand_in_runs import wait_for


def told(*payloads: schema.Payload, after: int = 0) -> list[Row]:
    return list(rows([event(payload, rank=0) for payload in payloads], after))


def test_steps_done_again_are_told_once() -> None:
    steps = [step_finished(step) for step in (1, 2, 3, 2, 3, 4)]
    assert [row.step for row in told(*steps)] == [1, 2, 3, 4]
    assert [row.step for row in told(*steps, after=2)] == [3, 4]


def test_a_validation_is_told_with_its_step() -> None:
    validation = schema.Evaluated(step=2, loss=3.0, seconds=0.1)
    with_step = told(step_finished(1), step_finished(2), validation)
    assert [row.values.get("validation/loss") for row in with_step] == [None, 3.0]
    assert told(validation, after=2) == [Row(2, {"validation/loss": 3.0})]
    assert told(validation, after=3) == []


def test_tokens_are_those_that_the_weights_have_seen() -> None:
    [row] = told(step_finished(7))
    assert row.values["tokens"] == 7 * 2048


def records(path: Path) -> list[bytes]:
    """Records of a file in the log format of LevelDB, in which Weights & Biases keeps what it is told: blocks
    of 32 KiB, each with chunks of checksum, length and type (whole, first, middle, last)."""
    data, found, parts = path.read_bytes(), [], b""
    at = 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(parts)
            parts = b""
    return found


def history(folder: Path) -> tuple[set[str], list[dict[str, float]]]:
    """Run ids and rows in all files of a folder."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    ids, found = set(), []
    for path in sorted(folder.glob("offline-run-*/*.wandb")):
        for raw in records(path):
            record = messages.Record()
            record.ParseFromString(raw)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                items = record.history.item
                row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                row.setdefault("_step", record.history.step.num)
                found.append(row)
    return ids, found


def test_weights_and_biases_has_one_run_without_doubles(capsys, tell, tmp_path) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install 'llmtrain[wandb]'")
    run, out = tell("restarted").run, tmp_path / "w"
    command = ["wandb", str(run.path), "--out", str(out)]
    assert run_command(command) == 0
    assert "told 41 steps" in capsys.readouterr().err
    assert run_command(command) == 0
    assert "told 0 steps" in capsys.readouterr().err
    assert run_command([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["told"], told["files"]) == (0, str(out / "wandb"))
    write_attempt(run, 3, attempt_files(3, restored=40, steps=4, world_size=8, start=START + 40))
    assert run_command(command) == 0
    assert "told 3 steps" in capsys.readouterr().err
    # Their own process may still be writing.
    wait_for(lambda: len(history(out / "wandb")[1]) >= 44, 60, "all rows")
    ids, found = history(out / "wandb")
    assert ids == {"tiny-0003"}
    losses = {row["_step"]: row["training/loss"] for row in found if "training/loss" in row}
    assert sorted(losses) == list(range(1, 45))
    assert [row["_step"] for row in found if "training/loss" in row] == list(range(1, 45)), "each once"
    assert losses[44] == pytest.approx(5.5 / 44**0.2)
    assert [row["_step"] for row in found if "validation/loss" in row][:3] == [5, 10, 15]
