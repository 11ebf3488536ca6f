"""A rank's whole life under torchrun: its log, events, checkpoints, a polite stop, and a resume that
repeats the losses."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import llmtrain
from llmtrain.config.checkpoint import CheckpointConfig
from llmtrain.config.cluster import BackendConfig, ClusterProfile, LinkConfig, StorageConfig
from llmtrain.config.data import DataConfig
from llmtrain.config.job import job_spec
from llmtrain.config.layout import Layout
from llmtrain.config.model import ModelConfig
from llmtrain.config.recipe import BatchConfig, Recipe, TrainConfig
from llmtrain.corpus.preparation.prepare import prepare
from llmtrain.engine.process import nothing_collected
from llmtrain.events.event import Event
from llmtrain.events.reader import read_events
from llmtrain.events.schema import (
    CheckpointCommitted,
    Evaluated,
    PhaseStarted,
    RankFailed,
    RankFinished,
    RankStarted,
    RankStep,
    Restored,
    StepFinished,
)
from llmtrain.run.checkpoints import list_checkpoints
from llmtrain.run.data_file import CorpusPlace, DataFile, write_data_file
from llmtrain.run.job_file import AttemptFile, JobFile, write_attempt_file
from llmtrain.run.layout import RunDir
from tests.support.run_folder import write_job_file

pytestmark = pytest.mark.engine

LAYOUT = Layout(dp=2, micro_batch=2)
RECIPE = Recipe(
    name="life",
    model=ModelConfig(kind="llama", layers=2, hidden=32, heads=2, head_dim=16, ffn_hidden=64, sequence=32),
    data=DataConfig(validation_fraction=0.1, validation_every=4, validation_sequences=4),
    batch=BatchConfig(global_size=8),
    checkpoint=CheckpointConfig(every_steps=5),
    train=TrainConfig(steps=12, seed=3),
)
CLUSTER = ClusterProfile(
    name="here",
    nodes=1,
    gpus_per_node=2,
    accelerator="cpu",
    intra_node=LinkConfig(kind="shared-memory"),
    storage=StorageConfig(bandwidth=1e9),
    backend=BackendConfig(kind="local"),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataFile:
    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"document {number}: " + "the same words again and again; " * 12)
    prepared = prepare(replace(RECIPE.data, corpus=str(text)), folder / "prepared")
    return DataFile(corpora=(CorpusPlace(folder=str(prepared.folder), digest=prepared.digest),))


def make_run(folder: Path, recipe: Recipe, corpus: DataFile) -> RunDir:
    run = RunDir(folder)
    folder.mkdir()
    spec = job_spec(recipe, CLUSTER)
    write_job_file(
        run.job_json, JobFile(run_id=run.run_id, version=llmtrain.__version__, spec=spec, layout=LAYOUT)
    )
    write_data_file(run.data_json, corpus)
    return run


def start(
    run: RunDir, number: int, restore: str, layout: Layout = LAYOUT, ranks: int = 2
) -> subprocess.Popen[bytes]:
    attempt = run.attempt(number)
    attempt.path.mkdir(parents=True)
    write_attempt_file(
        attempt.attempt_json,
        AttemptFile(number=number, layout=layout, nodes=("localhost",), restore=restore),  # type: ignore[arg-type]
    )
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={run.run_id}.{number}"),
        *("--max-restarts=0", "-m", "llmtrain.engine", str(run.job_json)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def events_of(run: RunDir, number: int, rank: int) -> list[Event]:
    path = run.attempt(number).rank_events(rank)
    return list(read_events(path)) if path.exists() else []


def payloads(run: RunDir, number: int, kind: type, rank: int = 0) -> list[object]:
    return [event.payload for event in events_of(run, number, rank) if isinstance(event.payload, kind)]


def losses(run: RunDir, number: int) -> dict[int, float]:
    found = payloads(run, number, StepFinished)
    return {payload.step: payload.loss for payload in found if isinstance(payload, StepFinished)}


def test_a_life_a_stop_and_a_resume(tmp_path: Path, corpus: DataFile) -> None:
    whole = make_run(tmp_path / "whole", RECIPE, corpus)
    assert start(whole, 1, "fresh").wait(200) == 0
    kinds = [type(event.payload) for event in events_of(whole, 1, 0)]
    assert kinds[:2] == [RankStarted, PhaseStarted]
    assert kinds[-1] is RankFinished
    assert payloads(whole, 1, Restored) == [Restored(step=0, checkpoint=None, reason="first attempt")]
    assert [payload.step for payload in payloads(whole, 1, Evaluated)] == [4, 8, 12]  # type: ignore[attr-defined]
    assert [payload.step for payload in payloads(whole, 1, CheckpointCommitted)] == [5, 10, 12]  # type: ignore[attr-defined]
    for rank in (0, 1):
        assert payloads(whole, 1, RankFinished, rank) == [RankFinished(reason="completed", step=12)]
        assert [payload.step for payload in payloads(whole, 1, RankStep, rank)] == [1, 5, 10]  # type: ignore[attr-defined]
        assert whole.attempt(1).rank_log(rank).exists()
    assert payloads(whole, 1, StepFinished, rank=1) == []
    expected = losses(whole, 1)
    assert sorted(expected) == list(range(1, 13))

    slow = make_run(tmp_path / "stopped", RECIPE, corpus)
    process = start(slow, 1, "fresh")
    deadline = time.monotonic() + 200
    while not losses(slow, 1) and time.monotonic() < deadline:
        time.sleep(0.02)
    for rank in (0, 1):
        (started,) = payloads(slow, 1, RankStarted, rank)
        assert isinstance(started, RankStarted)
        os.kill(started.pid, signal.SIGTERM)
        os.kill(started.pid, signal.SIGUSR1)
    assert process.wait(200) == 0
    (finished,) = payloads(slow, 1, RankFinished)
    assert isinstance(finished, RankFinished)
    if finished.reason == "stopped":  # on a very busy machine it may have been done by then
        assert list_checkpoints(slow.checkpoints)[0].step == finished.step < 12
        assert start(slow, 2, "newest").wait(200) == 0
        assert payloads(slow, 2, Restored)[0].step == finished.step  # type: ignore[attr-defined]
        assert losses(slow, 1) | losses(slow, 2) == expected
    assert "File" in slow.attempt(1).rank_stacks(0).read_text()


def test_failures_are_told(tmp_path: Path, corpus: DataFile) -> None:
    run = make_run(tmp_path / "wrong", RECIPE, corpus)
    assert start(run, 1, "fresh", Layout(dp=4, micro_batch=2), ranks=1).wait(200) == 1
    (failed,) = payloads(run, 1, RankFailed)
    assert isinstance(failed, RankFailed)
    assert failed.error_class == "config"
    assert "its layout needs 4 ranks, torchrun started 1" in failed.error
    wrong = replace(corpus.corpora[0], digest="0" * 64)
    write_data_file(run.data_json, DataFile(corpora=(wrong,)))
    assert start(run, 2, "fresh", Layout(micro_batch=2), ranks=1).wait(200) == 1
    (failed,) = payloads(run, 2, RankFailed)
    assert isinstance(failed, RankFailed)
    assert failed.error_class == "data"
    assert "Traceback" in run.attempt(2).rank_log(0).read_text()


def test_without_torchrun_it_says_how_to_start(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run(
        [sys.executable, "-m", "llmtrain.engine", str(tmp_path / "job.json")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "a rank needs torchrun's variables: RANK is not set" in result.stderr
    assert "llmtrain launch" in result.stderr


def test_nothing_imports_torch_before_a_rank_is_seen() -> None:
    code = "import llmtrain.engine.__main__, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_imports_are_not_looked_through_for_garbage() -> None:
    with nothing_collected():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() > 0
    gc.unfreeze()
