"""How far a prediction can be trusted: its error band, what its constants do not cover, and whether it beats
everything that was ever published.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.config.cluster import CalibrationConfig, ClusterProfile
from llmtrain.errors import Problem
from llmtrain.hardware import ACCELERATORS
from llmtrain.plan.machine import Machine
from llmtrain.plan.plan import Candidate

TABLE_BAND = 0.18
"""Nine of ten published runs lie within this of the prediction from the shipped tables
(tests/bench/planner_accuracy.py).
"""
_UNKNOWN_BAND = 0.30
CALIBRATED_BAND = 0.10
"""The same with constants from three runs of the cluster."""
_CPU_BAND = 0.90
"""The table has one processor; torch runs up to ten times slower on others (`hardware.py`)."""

# Best published model-FLOPs utilisation: (billions of parameters up to, MFU), against the peak of the run's
# own format.
_A100 = ((1.0, 0.54), (5.0, 0.64), (10.0, 0.68), (20.0, 0.61), (90.0, 0.56), (2000.0, 0.563))
_H100 = ((5.0, 0.465), (10.0, 0.622), (20.0, 0.602), (90.0, 0.544), (500.0, 0.573))
_H100_FP8 = ((10.0, 0.411), (20.0, 0.423), (90.0, 0.426), (500.0, 0.448))
_B200 = ((2000.0, 0.48),)
_B200_FP8 = ((10.0, 0.361), (90.0, 0.395), (2000.0, 0.419))
BEST_PUBLISHED: dict[tuple[str, bool], tuple[tuple[float, float], ...]] = {
    ("a100", False): _A100,
    ("a800", False): _A100,
    ("h100", False): _H100,
    ("h100", True): _H100_FP8,
    ("h200", False): _H100,
    ("h200", True): _H100_FP8,
    ("b200", False): _B200,
    ("b200", True): _B200_FP8,
    ("gb200", False): _B200,
    ("gb200", True): _B200_FP8,
}
"""By accelerator family and FP8. Sources: fms-fsdp (7B, 13B), llm-foundry, Korthikanti et al. 2022, dgxc-
benchmarking, Megatron-Bridge.
"""


def error_band(machine: Machine, calibration: CalibrationConfig) -> float:
    """Half-width of the band around the step time, as a share of it."""
    if calibration.gemm is not None and calibration.date and not is_outdated(machine, calibration):
        return CALIBRATED_BAND
    if machine.is_cpu:
        return _CPU_BAND
    return TABLE_BAND if machine.accelerator.name in ACCELERATORS else _UNKNOWN_BAND


def is_outdated(machine: Machine, calibration: CalibrationConfig) -> bool:
    """Whether CPU rates were measured before cores were counted with them: they mean something else today."""
    return machine.is_cpu and calibration.gemm is not None and calibration.cores is None


def doubts(machine: Machine, cluster: ClusterProfile, mode: str) -> Iterator[Problem]:
    """Yield what the constants of a profile for CPU ranks do not cover."""
    known, threads = cluster.calibration, cluster.environment.variables.get("OMP_NUM_THREADS", "1")
    if is_outdated(machine, known):
        message = "the profile's rates are of an older calibration, without `cores`: they mean something else"
        yield Problem("calibration", message, "calibrate it anew: `llmtrain profiles calibrate`")
    if not machine.is_cpu or known.cores is None or known.intra_node is not None:  # or fitted to runs
        return
    hint = "calibrate with a run as well: `llmtrain profiles calibrate --run RUN`"
    if mode in ("fp32", "tf32"):
        message = "the micro-benchmark measured products in BF16; those in FP32 are guessed from the table"
        yield Problem("calibration", message, hint)
    if threads != "1":
        message = f"the micro-benchmark measured one thread; OMP_NUM_THREADS={threads} is set for every rank"
        yield Problem("calibration", message, hint)


def best_published(accelerator: str, parameters: float, fp8: bool) -> float | None:
    """Best published MFU for an accelerator and a model of this size; None where nothing is on record."""
    classes = BEST_PUBLISHED.get((accelerator.split("-", 1)[0], fp8))
    if classes is None:
        return None
    for limit, mfu in classes:
        if parameters <= limit * 1e9:
            return mfu
    return classes[-1][1]


def optimism(candidate: Candidate, machine: Machine, parameters: float, mode: str) -> str | None:
    """A warning when the predicted MFU is above the best that anybody has published for this class."""
    best = best_published(machine.accelerator.name, parameters, mode == "fp8")
    mfu = candidate.predicted.mfu
    if best is None or mfu <= best:
        return None
    return (
        f"predicted MFU {100 * mfu:.1f} % > {100 * best:.1f} %, the best published for "
        f"{machine.accelerator.title} at this size: treat it as a claim to be measured"
    )
