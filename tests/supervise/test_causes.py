"""From what a failing rank leaves behind to the class of its failure."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.events.state import RunState
from llmtrain.supervise.detection.detect import Finding
from llmtrain.supervise.detection.reports import RankEnd, Reports
from llmtrain.supervise.explanation.causes import CLASSES, cause_in_lines, cause_of
from llmtrain.supervise.explanation.post_mortem import _ranks

DATA = Path(__file__).parents[1] / "data"

SAMPLES: tuple[tuple[str, str], ...] = tuple(
    (kind, line)
    for kind, _, line in (
        row.partition("\t") for row in (DATA / "failure_lines.tsv").read_text(encoding="utf-8").splitlines()
    )
)
"""Class and line, as such failures print them."""


@pytest.mark.parametrize(("kind", "line"), SAMPLES, ids=lambda value: value[:40])
def test_lines_tell_their_class(kind: str, line: str) -> None:
    """Also with a traceback before and chatter after."""
    lines = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', line, "bye"]
    found = cause_in_lines(lines)
    assert found is not None and (found.kind, found.evidence) == (kind, line)
    assert kind in CLASSES


@pytest.mark.parametrize(
    "line",
    [
        "W0101 torch/distributed/run.py:774] Setting OMP_NUM_THREADS environment variable for each process",
        "UserWarning: The given NumPy array is not writable",
        "step 100 loss 2.31 grad norm 0.8",
        "Error rate of the validation set: 3 %",
    ],
)
def test_chatter_tells_nothing(line: str) -> None:
    assert cause_in_lines([line]) is None


SCHEDULER = next(line for kind, line in SAMPLES if kind == "scheduler")
NCCL = next(line for kind, line in SAMPLES if kind == "communication")


def dead(code: int, *, rank: int = 3) -> tuple[Finding, RankEnd]:
    finding = Finding(kind="rank_dead", message=f"rank {rank} died", at=1.0, rank=rank, node=0)
    return finding, RankEnd(rank=rank, node=0, exit_code=code, at=1.0, asked=False, killed=False, lines=())


OOM_LINE = "Out of memory: Killed process 4711 (python) total-vm:91234567kB, anon-rss:61234567kB"


@pytest.mark.parametrize(
    ("code", "lines", "kernel", "kills", "kind"),
    [
        (-signal.SIGKILL, (), (), 0, "signal"),
        (-signal.SIGKILL, (), (OOM_LINE,), 0, "host_memory"),
        (-signal.SIGKILL, (), (), 1, "host_memory"),
        (-signal.SIGKILL, ("step 3",), (), 2, "host_memory"),
        (-signal.SIGKILL, (SCHEDULER,), (), 0, "scheduler"),
        (-signal.SIGSEGV, (), (OOM_LINE,), 0, "native_crash"),
        (-signal.SIGABRT, (NCCL,), (), 0, "communication"),
        (-signal.SIGABRT, (), (), 0, "native_crash"),
        (-signal.SIGBUS, ("Bus error: cannot write to /dev/shm",), (), 0, "host_memory"),
        (-signal.SIGTERM, (), (), 0, "signal"),
        (1, ("Traceback (most recent call last):", "ValueError: x"), (), 0, "user_code"),
        (1, (), ("NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.",), 0, "device"),
        (7, (), (), 0, "unknown"),
    ],
)
def test_death_of_a_rank(
    code: int, lines: tuple[str, ...], kernel: tuple[str, ...], kills: int, kind: str
) -> None:
    finding, end = dead(code)
    assert cause_of(finding, end, lines, kernel, kills, on_gpu=True).kind == kind


@pytest.mark.parametrize(
    ("code", "kills", "kind"), [(-9, 1, "host_memory"), (-9, 0, "launcher"), (1, 1, "launcher")]
)
def test_a_torchrun_that_the_kernel_killed(code: int, kills: int, kind: str) -> None:
    finding = Finding(kind="launcher_failed", message="something", at=1.0, node=0)
    assert cause_of(finding, None, (), (), kills, on_gpu=True, launcher_exit=code).kind == kind


@pytest.mark.parametrize(
    ("error_class", "on_gpu", "kind"),
    [
        ("out_of_memory", True, "device_memory"),
        ("out_of_memory", False, "host_memory"),
        ("communication", True, "communication"),
        ("storage", True, "storage"),
        ("numeric", True, "numeric"),
        ("config", True, "config"),
        ("checkpoint", True, "checkpoint"),
        ("data", True, "data"),
        ("user_code", True, "user_code"),
    ],
)
def test_the_ranks_own_word(error_class: str, on_gpu: bool, kind: str) -> None:
    finding = Finding(
        kind="rank_failed",
        message="rank 3 failed in step 2: RuntimeError: it broke",
        at=1.0,
        rank=3,
        node=0,
        error_class=error_class,
    )
    assert cause_of(finding, None, (), (), 0, on_gpu=on_gpu).kind == kind


def test_user_code_that_ran_into_the_device_is_told_so() -> None:
    """The engine cannot name an error of CUDA; its words do."""
    message = "rank 3 failed in step 2: RuntimeError: CUDA error: uncorrectable ECC error encountered"
    finding = Finding(kind="rank_failed", message=message, at=1.0, rank=3, node=0, error_class="user_code")
    assert cause_of(finding, None, (), (), 0, on_gpu=True).kind == "device"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("hang", "hang"), ("agent_lost", "node"), ("node_silent", "node"), ("launcher_failed", "launcher")],
)
def test_findings_without_a_rank(kind: str, expected: str) -> None:
    finding = Finding(kind=kind, message="something", at=1.0, node=0)
    assert cause_of(finding, None, (), (), 0, on_gpu=True).kind == expected


def test_what_the_tear_down_killed_did_not_run_out_of_memory() -> None:
    """Its node's kernel may have killed something else."""
    _, end = dead(-signal.SIGKILL)
    hang = Finding(kind="hang", message="no rank has finished anything", at=1.0, rank=3, node=0)
    ours = replace(end, killed=True)
    assert cause_of(hang, ours, (), (OOM_LINE,), 1, on_gpu=False).kind == "hang"
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    assert cause_of(hang, ours, (), (xid,), 0, on_gpu=True).kind == "device"


def test_a_post_mortem_tells_only_how_ranks_ended_by_themselves() -> None:
    reports = Reports(attempt=1, world_size=2)
    _, end = dead(-signal.SIGKILL, rank=0)
    reports.ends = {0: end, 1: replace(end, rank=1, killed=True)}
    assert [each.end for each in _ranks(reports, RunState())] == ["was killed by SIGKILL (exit code 137)", ""]
