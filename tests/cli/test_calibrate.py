"""`profiles calibrate`: what lands in the profile, from rates and from a run's events."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.cli import main
from llmtrain.cli.subcommands.calibrate import calibration_section, measured_step, with_calibration
from llmtrain.config.cluster import CalibrationConfig
from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.config.load import load_profile
from llmtrain.errors import UsageError
from llmtrain.events.schema import StepFinished
from llmtrain.events.writer import EventWriter
from llmtrain.hardware import ACCELERATORS
from llmtrain.plan.calibrate import from_rates
from llmtrain.run.job_file import AttemptFile, JobFile, write_attempt_file
from llmtrain.run.layout import RunDir
from tests.support.plans import local
from tests.support.run_folder import write_job_file

CONSTANTS = CalibrationConfig(
    gemm=0.5, memory_bandwidth=0.8, launch_gap=2.5e-6, cores=2, date="2026-01-31", evidence='a "test"'
)


def test_a_written_profile_reads_back_and_keeps_its_comments(tmp_path: Path) -> None:
    shipped = Path("cluster_profiles/local.yaml").read_text(encoding="utf-8")
    once = with_calibration(shipped, CONSTANTS)
    twice = with_calibration(once, replace(CONSTANTS, gemm=0.6))
    path = tmp_path / "mine.yaml"
    path.write_text(twice, encoding="utf-8")
    read = load_profile(str(path)).calibration
    assert read.launch_gap == pytest.approx(2.5e-6)
    assert replace(read, launch_gap=2.5e-6) == replace(CONSTANTS, gemm=0.6)
    assert twice.count("calibration:") == 1
    assert all(line in twice for line in shipped.splitlines() if line.startswith("#"))
    assert calibration_section(CONSTANTS).startswith("calibration:\n  gemm: 0.5\n")


def test_rates_become_shares_of_the_table() -> None:
    rates = {"gemm_flops": 2e10, "stream_bandwidth": 4e9, "small_op_seconds": 3e-6, "cores": 4.0}
    found = from_rates(local(), rates, date="2026-01-31", evidence="x")
    table = ACCELERATORS["cpu"]
    # Of the time of a product, what its operands take through memory is counted apart.
    assert found.gemm is not None
    assert 2e10 / table.bf16_flops < found.gemm < 2.3e10 / table.bf16_flops
    assert found.memory_bandwidth == pytest.approx(4e9 / table.memory_bandwidth)
    assert (found.launch_gap, found.cores, found.date) == (3e-6, 4.0, "2026-01-31")


def write_run(folder: Path, seconds: list[float]) -> RunDir:
    spec = resolve("tiny", "local")
    run = RunDir(folder / "tiny-1")
    layout = Layout(dp=2, tp=2, pp=2, micro_batch=2)
    run.attempt(1).events.mkdir(parents=True)
    write_job_file(run.job_json, JobFile(run_id="tiny-1", version="0", spec=spec, layout=layout))
    attempt = AttemptFile(number=1, layout=layout, nodes=("here",), restore="fresh")
    write_attempt_file(run.attempt(1).attempt_json, attempt)
    with EventWriter(run.attempt(1).rank_events(0), run="tiny-1", attempt=1, source="rank", rank=0) as writer:
        for step, value in enumerate(seconds, start=1):
            writer.emit(
                StepFinished(
                    step=step,
                    loss=1.0,
                    grad_norm=1.0,
                    learning_rate=1e-3,
                    seconds=value,
                    tokens=2048,
                    tokens_per_second=2048 / value,
                )
            )
    return run


def test_a_run_counts_by_its_median_step_after_the_first_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path, [9.0, 9.0, 9.0, 0.5, 0.4, 0.6, 0.5])
    step = measured_step(local(), str(run.path))
    assert step.seconds == 0.5
    assert step.layout == Layout(dp=2, tp=2, pp=2, micro_batch=2)
    assert step.recipe.name == "tiny"


def test_a_run_is_fitted_and_the_profile_says_how_well(tmp_path: Path, capsys) -> None:
    run, profile = write_run(tmp_path, [0.5] * 8), tmp_path / "fitted.yaml"
    given = ["local", "--run", str(run.path), "--no-microbench", "--output", str(profile)]
    assert main.run(["profiles", "calibrate", *given]) == 0
    evidence = load_profile(str(profile)).calibration.evidence
    found = re.fullmatch(r"1 run \(tiny-1\), worst error ([\d.]+) %, ([\d.]+) % before", evidence)
    assert found is not None, evidence
    assert float(found[1]) < float(found[2]), "one step can be met better than the table does"
    assert evidence in capsys.readouterr().out


def test_a_run_that_is_too_short_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, [9.0, 9.0, 9.0, 0.5])
    with pytest.raises(UsageError, match="no attempt of tiny-1 has 6 steps"):
        measured_step(local(), str(run.path))
