"""Fit a profile's constants to measured steps of its own cluster.

A few steps cannot settle seven constants, so each stays near the hardware table unless the measurements say
otherwise: the fit finds the most probable logarithms of the factors, with normal priors of the widths below
and heavy-tailed errors of the measurements. Iterated Gauss-Newton; no dependency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt

from llmtrain.config.cluster import CalibrationConfig, ClusterProfile
from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from llmtrain.plan.evaluate import Evaluator, busiest
from llmtrain.plan.machine import Machine, make_machine
from llmtrain.plan.timing.kernels import Kernels
from llmtrain.plan.workload import make_workload

_NOISE = 0.08
"""Relative error of one measured step, and of the model's shape after calibration, as long as nothing is
known."""
_NOISE_STEPS = 3
"""As many steps' worth is that known: more steps that fit better tell that the noise is less."""
_TAIL = 2.0
"""How many times the noise a residual may be before it counts half."""
WIDTHS: dict[str, float] = {
    "gemm": 0.08,
    "attention": 0.12,
    "fp8": 0.10,
    "memory_bandwidth": 0.06,
    "launch_gap": 1.50,
    "intra_node": 1.30,
    "inter_node": 0.60,
    "step_overhead": 0.80,
}
"""How far each constant may lie from the table: standard deviation of its logarithm. Kernels of one
accelerator differ little between clusters; host software and networks differ by factors."""
_CPU_WIDTH = 0.80
"""Least width for CPU ranks: no table can know a processor."""
_BENCHMARKED_WIDTHS = {"launch_gap": 0.30, "intra_node": 0.40, "step_overhead": 0.50}
"""Other widths for CPU ranks whose rates a micro-benchmark has measured; its kernels keep theirs."""
_ROUNDS = 12
CPU_PRODUCT = (1024, 512, 512)
"""Rows, columns and inner size of the product that the micro-benchmark multiplies on CPUs."""
CPU_ATTENTION = (4, 32, (128, 512))
"""Heads, their width, and the lengths at which it measures attention there, forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One measurement: what ran where, and how long a step took."""

    recipe: Recipe
    cluster: ClusterProfile
    layout: Layout
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """What a calibration found."""

    factors: dict[str, float]
    """Against the profile's constants so far, the hardware table's where it has none."""
    errors: tuple[float, ...]
    """predicted/measured - 1 of each step, after the fit."""

    @property
    def worst(self) -> float:
        """Largest absolute error."""
        return max(abs(error) for error in self.errors)


def fit(steps: Sequence[MeasuredStep]) -> Fit:
    """Fit all factors to some steps of one cluster (or of clusters with the same software)."""
    cases = [_Case(step) for step in steps]
    names = list(WIDTHS)
    values = dict.fromkeys(names, 0.0)
    widths = _widths(cases)
    for _ in range(_ROUNDS):
        residuals = [case.error(values) for case in cases]
        slopes = [[_slope(case, values, name) for name in names] for case in cases]
        change = _solve(residuals, slopes, [values[name] for name in names], widths, _noise(residuals))
        for name, step in zip(names, change, strict=True):
            values[name] += max(-0.3, min(0.3, step))
    errors = tuple(exp(case.error(values)) - 1.0 for case in cases)
    return Fit({name: exp(value) for name, value in values.items()}, errors)


def _widths(cases: Sequence[_Case]) -> list[float]:
    """How far each constant may lie from what is known of it."""
    if not any(case.is_cpu for case in cases):
        return list(WIDTHS.values())
    if all(case.is_benchmarked for case in cases):
        return list((WIDTHS | _BENCHMARKED_WIDTHS).values())
    return [max(_CPU_WIDTH, width) for width in WIDTHS.values()]


def predict(step: MeasuredStep, factors: dict[str, float] | None = None) -> float:
    """Seconds that a step is predicted to take, with factors on the hardware table."""
    logarithms = {name: log(value) for name, value in (factors or dict.fromkeys(WIDTHS, 1.0)).items()}
    return step.seconds * exp(_Case(step).error(logarithms))


def calibrated(cluster: ClusterProfile, found: Fit, *, date: str, evidence: str) -> CalibrationConfig:
    """The profile's constants so far (the table's where it has none) times the factors."""
    machine = make_machine(cluster)
    streaming = machine.memory_bandwidth / machine.accelerator.memory_bandwidth
    factors, known = found.factors, cluster.calibration
    return CalibrationConfig(
        gemm=machine.gemm * factors["gemm"],
        attention=machine.attention * factors["attention"],
        fp8=machine.fp8 * factors["fp8"],
        memory_bandwidth=streaming * factors["memory_bandwidth"],
        launch_gap=machine.launch_gap * factors["launch_gap"],
        intra_node=(known.intra_node or 1.0) * factors["intra_node"],
        inter_node=(known.inter_node or 1.0) * factors["inter_node"],
        cores=machine.cores if machine.is_cpu else known.cores,  # which the others are fitted with
        step_overhead=machine.step_overhead * factors["step_overhead"],
        date=date,
        evidence=evidence,
    )


def from_rates(
    cluster: ClusterProfile, rates: dict[str, float], *, date: str, evidence: str
) -> CalibrationConfig:
    """Constants from a micro-benchmark's rates (`gemm_flops`, `attention_flops`, `stream_bandwidth`,
    `small_op_seconds`, `cores`), kept where it did not look."""
    machine = make_machine(cluster)
    accelerator = machine.accelerator
    known = cluster.calibration
    if machine.is_cpu:
        return _from_cpu_rates(machine, known, rates, date=date, evidence=evidence)
    kernels = ("flash1", "flash2", "flash3")
    kernel = machine.software.attention
    attention = known.attention
    if kernel in kernels and "attention_flops" in rates:
        share = accelerator.attention[kernels.index(kernel)]
        attention = rates["attention_flops"] / (accelerator.bf16_flops * share)
    return replace(
        known,
        gemm=rates["gemm_flops"] / accelerator.bf16_flops,
        attention=attention,
        memory_bandwidth=rates["stream_bandwidth"] / accelerator.memory_bandwidth,
        launch_gap=rates["small_op_seconds"],
        date=date,
        evidence=evidence,
    )


def _from_cpu_rates(
    machine: Machine, known: CalibrationConfig, rates: dict[str, float], *, date: str, evidence: str
) -> CalibrationConfig:
    """The same of a CPU, so that the model predicts what was measured: a product's operands pass through
    memory, and attention over few keys is slow."""
    accelerator = machine.accelerator
    machine = replace(
        machine,
        memory_bandwidth=rates["stream_bandwidth"],
        launch_gap=rates["small_op_seconds"],
        gemm=1.0,
        attention=1.0,
    )
    kernels = Kernels(machine, "bf16")
    rows, width, inner = CPU_PRODUCT
    flops = 2.0 * rows * width * inner
    beside = kernels.product(rows, width, inner) - flops / accelerator.bf16_flops
    compute = max(0.5 * flops / rates["gemm_flops"], flops / rates["gemm_flops"] - beside)
    attention = known.attention
    if machine.software.attention != "unfused" and "attention_flops" in rates:
        heads, head_dim, lengths = CPU_ATTENTION
        table = sum(sum(kernels.attention(heads, keys, keys, head_dim, 1)) for keys in lengths)
        attention = table * rates["attention_flops"] / sum(7.0 * heads * n * n * head_dim for n in lengths)
    return replace(
        known,
        gemm=flops / compute / accelerator.bf16_flops,
        attention=attention,
        memory_bandwidth=rates["stream_bandwidth"] / accelerator.memory_bandwidth,
        launch_gap=rates["small_op_seconds"],
        cores=rates["cores"],
        date=date,
        evidence=evidence,
    )


def scaled(machine: Machine, factors: dict[str, float]) -> Machine:
    """A machine with factors on its table values."""
    intra, inter = machine.intra, machine.inter
    return replace(
        machine,
        gemm=machine.gemm * factors["gemm"],
        attention=machine.attention * factors["attention"],
        fp8=machine.fp8 * factors["fp8"],
        memory_bandwidth=machine.memory_bandwidth * factors["memory_bandwidth"],
        launch_gap=machine.launch_gap * factors["launch_gap"],
        step_overhead=machine.step_overhead * factors["step_overhead"],
        intra=replace(intra, bus=intra.bus * factors["intra_node"]),
        inter=None if inter is None else replace(inter, bus=inter.bus * factors["inter_node"]),
    )


class _Case:
    """One measured step, predicted for any factors."""

    def __init__(self, step: MeasuredStep) -> None:
        self._machine = make_machine(step.cluster)
        self.is_benchmarked = step.cluster.calibration.cores is not None
        """Whether a micro-benchmark of CPU ranks measured the rates of the kernels, which counts the cores as
        well; what one measured that did not means something else today."""
        self._work = make_workload(step.recipe, self._machine.software.framework)
        self._layout = step.layout
        self._seconds = step.seconds
        self._micro_batches = busiest(step.layout, step.recipe.batch.global_size)

    @property
    def is_cpu(self) -> bool:
        """Whether CPU ranks were measured: no table can know a processor."""
        return self._machine.is_cpu

    def error(self, logarithms: dict[str, float]) -> float:
        """log(predicted / measured)."""
        machine = scaled(self._machine, {name: exp(value) for name, value in logarithms.items()})
        predicted = Evaluator(self._work, machine).seconds(self._layout, self._micro_batches)
        return log(predicted / self._seconds)


def _slope(case: _Case, values: dict[str, float], name: str) -> float:
    step = 0.02
    higher = {**values, name: values[name] + step}
    lower = {**values, name: values[name] - step}
    return (case.error(higher) - case.error(lower)) / (2 * step)


def _noise(residuals: Sequence[float]) -> float:
    """Relative error of a step, by what is known beforehand and by the residuals."""
    squares = sum(residual**2 for residual in residuals)
    noise = sqrt((_NOISE_STEPS * _NOISE**2 + squares) / (_NOISE_STEPS + len(residuals)))
    return min(_NOISE, noise)


def _solve(
    residuals: Sequence[float],
    slopes: Sequence[Sequence[float]],
    values: Sequence[float],
    widths: Sequence[float],
    noise: float,
) -> list[float]:
    """The Gauss-Newton change of the values: normal equations of errors and priors."""
    count = len(values)
    matrix = [[0.0] * count for _ in range(count)]
    right = [0.0] * count
    for residual, row in zip(residuals, slopes, strict=True):
        tail = (residual / _TAIL) ** 2 if len(residuals) > 2 else 0.0  # one odd run of several must not rule
        weight = 1.0 / (noise**2 + tail)
        for i in range(count):
            right[i] -= row[i] * residual * weight
            for j in range(count):
                matrix[i][j] += row[i] * row[j] * weight
    for i in range(count):
        matrix[i][i] += 1.0 / widths[i] ** 2
        right[i] -= values[i] / widths[i] ** 2
    return _eliminate(matrix, right)


def _eliminate(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a symmetric positive system (the priors make it so) by elimination."""
    count = len(right)
    for i in range(count):
        for j in range(i + 1, count):
            factor = matrix[j][i] / matrix[i][i]
            right[j] -= factor * right[i]
            for k in range(i, count):
                matrix[j][k] -= factor * matrix[i][k]
    result = [0.0] * count
    for i in reversed(range(count)):
        known = sum(matrix[i][k] * result[k] for k in range(i + 1, count))
        result[i] = (right[i] - known) / matrix[i][i]
    return result
