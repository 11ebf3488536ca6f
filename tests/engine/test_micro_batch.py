"""The micro-batch changes by memory and speed, alike on all ranks, and the training stays the same."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import BatchConfig, MicroRange, Recipe
from llmtrain.engine.loop import Loop
from llmtrain.engine.micro_batch import MicroBatchControl
from llmtrain.engine.saving import CheckpointFolder
from llmtrain.events.schema import MicroBatchChanged, RankFailed, StepFinished
from llmtrain.plan.micro_batch import Choice, Votes, choices, first_choice, next_choice
from llmtrain.run.data_file import DataFile
from llmtrain.run.job_file import AttemptFile, write_attempt_file
from llmtrain.run.layout import RunDir
from llmtrain.run.memory_file import MemoryFile, read_memory_files, write_memory_file
from tests.engine.test_process import RECIPE, corpus, events_of, losses, make_run, payloads
from tests.support.engine_cases import Case, build, gpt, llama, recipe
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine
__all__ = ["corpus"]


def ranged(model: Any, micro: Any, **changes: Any) -> Recipe:
    made = recipe(model, **changes)
    return replace(made, batch=replace(made.batch, micro=micro))


# ---- what is decided ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("micro", "layout", "expected"),
    [
        (4, Layout(micro_batch=4), (4,)),
        ("auto", Layout(micro_batch=4), (1, 2, 4)),
        (MicroRange(min=2, max=8), Layout(micro_batch=2), (2, 4, 8)),
        (MicroRange(min=1, max=8), Layout(dp=4, micro_batch=1), (1, 2)),
        (MicroRange(min=1, max=8), Layout(dp=3, micro_batch=1), (1, 2)),
        (MicroRange(min=1, max=8), Layout(pp=2, vpp=2, schedule="interleaved", micro_batch=1), (1, 2, 4)),
        (MicroRange(min=1, max=8), Layout(pp=4, vpp=2, schedule="interleaved", micro_batch=1), (1, 2)),
    ],
)
def test_choices_keep_the_global_batch(micro: Any, layout: Layout, expected: tuple[int, ...]) -> None:
    found = choices(ranged(llama(), micro), layout)
    assert found == expected
    assert all(sum(replace(layout, micro_batch=size).micro_batches(8)) * size == 8 for size in found)


def test_a_fixed_accumulation_leaves_no_choice() -> None:
    made = recipe(llama())
    made = replace(made, batch=BatchConfig(global_size=8, micro="auto", accumulation=2))
    assert choices(made, Layout(dp=2, micro_batch=2)) == (2,)


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        (Votes(), 4),
        (Votes(tight=1.0), 2),
        (Votes(tight=1.0, larger=1.0), 2),
        (Votes(larger=1.0), 8),
        (Votes(larger=1.0, no_room=1.0), 4),
        (Votes(back=1.0), 2),
    ],
)
def test_one_rank_is_enough_to_shrink_and_all_must_have_room_to_grow(votes: Votes, expected: int) -> None:
    assert next_choice(4, (1, 2, 4, 8), votes).size == expected
    assert next_choice(4, (4,), votes) == Choice(4)


def test_an_attempt_begins_below_what_failed() -> None:
    planned, sizes = Layout(pp=2, micro_batch=4), (1, 2, 4)
    failed = (3, MemoryFile(rank=7, step=9, layout=replace(planned, dp=2, micro_batch=4)))
    assert first_choice(planned, sizes, None, []) == Choice(4)
    assert first_choice(planned, sizes, replace(planned, micro_batch=2), []).size == 2
    assert first_choice(planned, sizes, Layout(micro_batch=2), []).size == 4, "of another layout"
    chosen = first_choice(planned, sizes, replace(planned, micro_batch=4), [failed])
    assert chosen == Choice(2, "rank 7 ran out of memory with 4 in attempt 3")
    other = (4, MemoryFile(rank=0, step=9, layout=replace(planned, micro_batch=2)))
    assert first_choice(planned, sizes, None, [failed, other]).size == 1
    least = (5, MemoryFile(rank=0, step=9, layout=replace(planned, micro_batch=1)))
    assert first_choice(planned, sizes, None, [failed, other, least]).size == 1, "there is nothing smaller"
    tp = (3, MemoryFile(rank=7, step=9, layout=Layout(tp=2, micro_batch=1)))
    assert first_choice(planned, sizes, None, [tp]).size == 4


def test_notes_of_ranks_without_memory_are_read_by_all_later_attempts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    note = MemoryFile(rank=3, step=2, layout=Layout(micro_batch=2))
    write_memory_file(run, 1, note)
    write_memory_file(run, 2, replace(note, rank=4))
    (run.attempt(2).out_of_memory / "rank-00009.json").write_text("{torn")
    assert read_memory_files(run) == [(1, note), (2, replace(note, rank=4))]


# ---- what ranks do -----------------------------------------------------------------------------------------
@dataclass
class ScriptedMeter:
    """Tells what a test wants, look by look."""

    peaks: list[int]
    capacity: int = 1000
    thrashing: list[bool] = field(default_factory=list)

    def peak(self) -> int:
        return self.peaks.pop(0) if self.peaks else 0

    def is_thrashing(self) -> bool:
        return self.thrashing.pop(0) if self.thrashing else False


def loop_of(rank: int, case: Case, folder: Path, meter: ScriptedMeter) -> tuple[Loop, list[Any], Any]:
    torch.set_num_threads(1)
    parts, told = build(case, rank), []
    control = MicroBatchControl(parts, told.append, meter)
    control._states = 0
    checkpoints = CheckpointFolder(folder / "checkpoints", "run", parts, writer="attempt 1")
    progress = checkpoints.restore("newest")[0]
    control.begin(RunDir(folder), progress.extra, progress.step)
    loop = Loop(
        parts, checkpoints, told.append, should_stop=lambda: False, peak_flops=None, micro_batch=control
    )
    return loop, told, progress


def train(
    rank: int, world_size: int, case: Case, folder: str, peaks: list[list[int]]
) -> tuple[list[Any], int]:
    loop, told, progress = loop_of(rank, case, Path(folder), ScriptedMeter(list(peaks[rank])))
    loop.run(progress)
    return told, loop._parts.layout.micro_batch


def losses_told(told: list[Any]) -> list[float]:
    return [payload.loss for payload in told if isinstance(payload, StepFinished)]


def changes_told(told: list[Any]) -> list[tuple[int, int, int]]:
    return [(p.step, p.before, p.micro_batch) for p in told if isinstance(p, MicroBatchChanged)]


def test_all_ranks_change_together_and_losses_stay(tmp_path: Path) -> None:
    """Rank 3 is short of memory at the first look; growth is tried once, and stays or goes by its pace."""
    layout = Layout(dp=2, pp=2, micro_batch=2)
    case = Case(ranged(gpt(), MicroRange(min=1, max=4)), layout)
    fixed = Case(ranged(gpt(), 2), layout)
    peaks = [[100] * 9, [100] * 9, [100] * 9, [990, *[100] * 9]]
    results = run_ranks(train, 4, tmp_path, case, str(tmp_path / "free"), peaks)
    reference = run_ranks(train, 4, tmp_path, fixed, str(tmp_path / "fixed"), peaks)
    assert losses_told(results[0][0]) == pytest.approx(losses_told(reference[0][0]), abs=2e-5)
    changes = changes_told(results[0][0])
    assert changes[0] == (6, 2, 1)
    assert (11, 1, 2) in changes, "there is room again"
    assert len({size for _, size in results}) == 1
    assert changes_told(reference[0][0]) == []
    assert [changes_told(told) for told, _ in results[1:]] == [[], [], []], "rank 0 tells"
    ended = results[0][1]
    again = replace(case, recipe=replace(case.recipe, train=replace(case.recipe.train, steps=22)))
    resumed = run_ranks(train, 4, tmp_path, again, str(tmp_path / "free"), [[900] * 9] * 4)
    assert {size for _, size in resumed} == {ended}, "a resume goes on with the micro-batch in force"


def test_auto_never_grows(tmp_path: Path) -> None:
    case = Case(ranged(llama(), "auto"), Layout(micro_batch=2))
    told, size = train(0, 1, case, str(tmp_path), [[100] * 9])
    assert (changes_told(told), size) == ([], 2)


def test_what_ran_out_of_memory_is_not_grown_into_again(tmp_path: Path) -> None:
    case = Case(ranged(llama(), MicroRange(min=1, max=8)), Layout(micro_batch=1))
    run = RunDir(tmp_path)
    write_memory_file(run, 1, MemoryFile(rank=0, step=7, layout=Layout(micro_batch=4)))
    parts = build(case, 0)
    control = MicroBatchControl(parts, lambda _: None, ScriptedMeter([]))
    assert control._sizes == (1, 2, 4, 8)
    control.begin(run, {}, 0)
    assert (parts.layout.micro_batch, control._sizes) == (1, (1, 2))


def test_a_rank_alone_does_the_step_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(ranged(llama(), "auto"), Layout(micro_batch=8))
    loop, told, progress = loop_of(0, case, tmp_path, ScriptedMeter([]))

    def no_room(module: Any, inputs: Any) -> None:
        if inputs[0].shape[1] > 2 and loop.step >= 3:
            raise MemoryError("no room")

    loop._parts.stages[0].blocks[3].register_forward_pre_hook(no_room)
    assert loop.run(progress) == "completed"
    assert changes_told(told) == [(3, 8, 4), (3, 4, 2)]
    expected, _ = train(0, 1, Case(recipe(llama()), Layout(micro_batch=8)), str(tmp_path / "other"), [[]])
    assert losses_told(told) == pytest.approx(losses_told(expected), abs=2e-5)


# ---- whole processes ---------------------------------------------------------------------------------------
def start_small(run: RunDir, number: int, layout: Layout) -> int:
    attempt = run.attempt(number)
    attempt.path.mkdir(parents=True)
    file = AttemptFile(
        number=number, layout=layout, nodes=("localhost",), restore="fresh" if number == 1 else "newest"
    )
    write_attempt_file(attempt.attempt_json, file)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={run.run_id}.{number}"),
        *("--max-restarts=0", "-m", "tests.support.small_memory", str(run.job_json)),
    ]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    return subprocess.run(
        command,
        env=environment,
        cwd=root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=200,
        check=False,
    ).returncode


def test_out_of_memory_on_one_stage_is_a_smaller_micro_batch_on_both(
    tmp_path: Path, corpus: DataFile
) -> None:
    """Rank 1 of a pipeline dies of memory while rank 0 waits for it; the next attempt needs nobody's word
    to begin with a smaller micro-batch, and trains as if nothing had been."""
    short = replace(
        RECIPE, train=replace(RECIPE.train, steps=5), data=replace(RECIPE.data, validation_every=0)
    )
    free = replace(short, batch=replace(short.batch, micro="auto"))
    layout = Layout(pp=2, micro_batch=2)
    run = make_run(tmp_path / "run", free, corpus)
    assert start_small(run, 1, layout) == 1
    (failed,) = payloads(run, 1, RankFailed, rank=1)
    assert isinstance(failed, RankFailed)
    assert (failed.error_class, failed.step) == ("out_of_memory", 3)
    assert start_small(run, 2, layout) == 0
    (changed,) = payloads(run, 2, MicroBatchChanged)
    assert changed == MicroBatchChanged(
        step=1, micro_batch=1, before=2, reason="rank 1 ran out of memory with 2 in attempt 1"
    )
    assert losses(run, 2).keys() == {1, 2, 3, 4, 5}
    early = losses(run, 1)
    assert [losses(run, 2)[step] for step in early] == pytest.approx(list(early.values()), abs=1e-2)
    assert [event for event in events_of(run, 2, 1) if isinstance(event.payload, RankFailed)] == []
