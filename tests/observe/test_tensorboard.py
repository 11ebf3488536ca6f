"""TensorBoard files, read back by TensorBoard itself."""

import math
import struct

import pytest

from llmtrain.cli.main import run as run_command
from llmtrain.observe.trackers.tensorboard import _masked_crc, file_head, record, records
from tests.support.sample_events import event, step_finished


def test_checksums_are_those_of_the_standard() -> None:
    unmasked = (_masked_crc(b"123456789") - 0xA282EAD8) & 0xFFFFFFFF
    assert (unmasked >> 17 | unmasked << 15) & 0xFFFFFFFF == 0xE3069283, "the check value of CRC-32C"


def test_record_layout() -> None:
    data = record(b"abc")
    assert struct.unpack("<Q", data[:8]) == (3,) and data[12:15] == b"abc" and len(data) == 8 + 4 + 3 + 4


def test_numbers_that_no_float32_can_hold() -> None:
    for loss in (1e300, -1e300, math.nan, math.inf):
        [written] = records([event(step_finished(1, loss=loss), rank=0)])
        assert len(written) > 50


@pytest.fixture
def accumulator():
    module = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="needs tensorboard: pip install '.[test]'",
    )
    return module.EventAccumulator


def test_tensorboard_reads_a_restarted_run_without_doubles(capsys, tell, tmp_path, accumulator) -> None:
    run = tell("restarted").run
    assert run_command(["tensorboard", str(run.path), "--out", str(tmp_path / "tb")]) == 0
    assert "tensorboard --logdir" in capsys.readouterr().err
    read = accumulator(str(tmp_path / "tb" / "tiny-0003"))
    read.Reload()
    assert set(read.Tags()["scalars"]) >= {"training/loss", "training/gradient_norm", "validation/loss"}
    losses = read.Scalars("training/loss")
    assert [point.step for point in losses] == list(range(1, 42))
    assert [point.value for point in losses] == pytest.approx([5.5 / step**0.2 for step in range(1, 42)])
    assert [point.step for point in read.Scalars("validation/loss")] == [5, 10, 15, 20, 25, 30, 35, 40]


def test_following_a_run_that_is_over_ends(tell, tmp_path) -> None:
    run = tell("finished").run
    assert run_command(["tensorboard", str(run.path), "--out", str(tmp_path), "--follow"]) == 0
    assert (tmp_path / "tiny-0004").is_dir()


def test_head_names_the_version() -> None:
    assert b"brain.Event:2" in file_head(1.0)
