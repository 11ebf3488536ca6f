"""How far the planner is off on every published run of the data file.

`python -m tests.bench.planner_accuracy` prints each group with its bias, the calibrated errors, memory,
ranking and search, and exits 1 when a bar falls. A bar is the goal where that is reached; where not yet, the
bar holds the state, and the goal is printed beside it.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from llmtrain.config.cluster import SoftwareConfig
from llmtrain.plan.calibrate import MeasuredStep, fit, predict
from llmtrain.plan.evaluate import Evaluator
from llmtrain.plan.layouts.engine_features import ANY_ENGINE
from llmtrain.plan.layouts.search import Search
from llmtrain.plan.machine import make_machine
from llmtrain.plan.memory.model import MemoryModel, StageMemory
from llmtrain.plan.trust import CALIBRATED_BAND, TABLE_BAND
from llmtrain.plan.workload import make_workload
from tests.support.later_runs import FITTED_TO, later_runs
from tests.support.plans import a100, recipe
from tests.support.published import Row, rows

NOT_COMPARABLE = {
    "bigscience-prequel-182b-384-tp4pp12mbs2": "78 layers lay 7 to a stage and 1 on the last ('Re-do')",
}
"""Runs whose memory is that of a layout which the planner does not make, and what the source says of it."""
CALIBRATED = ("bigscience_a100", "llm_foundry", "dgxc_benchmarking", "torchtitan", "internevo")


@dataclass(frozen=True)
class Bar:
    """One figure that must not get worse."""

    name: str
    value: float
    bar: float
    goal: float

    @property
    def holds(self) -> bool:
        """Whether the figure is within the bar."""
        return self.value <= self.bar


def step_of(row: Row) -> MeasuredStep:
    """A row as a measurement."""
    assert row.seconds is not None
    return MeasuredStep(recipe=row.recipe, cluster=row.cluster, layout=row.layout, seconds=row.seconds)


def timed(found: Iterable[Row]) -> list[Row]:
    """Rows with a step time that their source does not contradict."""
    return [row for row in found if row.seconds and not row.suspect]


def errors(found: Sequence[Row]) -> list[float]:
    """predicted/measured - 1 with the shipped tables only."""
    return [predict(step_of(row)) / row.seconds - 1 for row in found if row.seconds]


def mape(values: Sequence[float]) -> float:
    """Mean absolute error, percent."""
    return 100 * mean(map(abs, values))


def print_errors(name: str, found: Sequence[float]) -> None:
    """One row of a table."""
    print(
        f"{name} {len(found):5d} {mape(found):5.1f} {100 * median(map(abs, found)):7.1f} "
        f"{100 * mean(found):+7.1f} {100 * max(map(abs, found)):8.1f}"
    )


def step_bars() -> list[Bar]:
    """Print the step times of all groups; return their bars."""
    by_group: dict[tuple[str, str], list[float]] = {}
    for row in timed(rows()):
        by_group.setdefault((row.group, row.tier), []).extend(errors([row]))
    print(f"{'step time, shipped tables only':32s}   n  MAPE  median    bias    worst")
    for (group, tier), found in by_group.items():
        print_errors(f"{group:28s} {tier}", found)
    classic = [row for row in timed(rows("korthikanti2022", "sc21_megatron")) if row.layout.zero < 3]
    grid = errors([row for row in timed(rows("vtrain_multi_node")) if row.layout.tp <= 8])
    tier_a = errors([row for row in timed(rows()) if row.tier == "A"])
    outside = 100 * mean(abs(error) > TABLE_BAND for error in tier_a)
    return [
        Bar("outside of the band of the shipped tables, %", outside, 10.0, 10.0),
        Bar(f"Korthikanti + SC21, MAPE ({len(classic)} runs)", mape(errors(classic)), 5.0, 5.0),
        Bar(f"vTrain tp <= 8, median ({len(grid)} runs)", 100 * median(map(abs, grid)), 4.0, 4.0),
        Bar(f"vTrain tp <= 8, MAPE ({len(grid)} runs)", mape(grid), 8.0, 8.0),
        Bar(f"all tier A, MAPE ({len(tier_a)} runs)", mape(tier_a), 5.0, 10.0),
    ]


def later_bars() -> list[Bar]:
    """Print the step times and the memory of sources that nothing, or little, was fitted to; return their
    bars."""
    kinds: dict[str, list[float]] = {"later": [], "fitted": [], "held out": []}
    memory: list[float] = []
    print(f"\n{'step time, later sources':32s}   n  MAPE  median    bias    worst")
    for name, runs in later_runs().items():
        found = [predict(run.step) / run.step.seconds - 1 for run in runs]
        print_errors(f"{name:30s}", found)
        for run, error in zip(runs, found, strict=True):
            kind = "fitted" if run.step.cluster.accelerator in FITTED_TO else "later"
            kinds["held out" if run.held_out else kind].append(error)
        memory += [reserved(run.step) / run.reserved - 1 for run in runs if run.reserved]
    print_errors(f"{'memory, allocator':30s}", memory)
    later, fitted, held_out = kinds.values()
    middle = 100 * median(map(abs, held_out))
    return [
        Bar(f"later sources, MAPE ({len(later)} runs)", mape(later), 7.0, 10.0),
        Bar(f"later Blackwell runs, partly fitted, MAPE ({len(fitted)} runs)", mape(fitted), 5.0, 5.0),
        Bar(f"held-out sources, MAPE ({len(held_out)} runs)", mape(held_out), 10.0, 10.0),
        Bar(f"held-out sources, median ({len(held_out)} runs)", middle, 7.5, 7.5),
        Bar(f"later sources, memory, MAPE ({len(memory)} runs)", mape(memory), 1.0, 3.0),
    ]


def unstated_bars() -> list[Bar]:
    """Print how far off every run is whose profile names its framework, and unfused attention, but no other
    trait; return the bars."""
    steps = [step_of(row) for row in timed(rows())]
    steps += [run.step for runs in later_runs().values() for run in runs]
    found = [predict(_barely_stated(step)) / step.seconds - 1 for step in steps]
    print_errors(f"\n{'all runs, traits left open':30s}", found)
    middle = 100 * median(map(abs, found))
    return [
        Bar(f"traits left open, MAPE ({len(found)} runs)", mape(found), 10.0, 10.0),
        Bar(f"traits left open, median ({len(found)} runs)", middle, 7.0, 7.0),
    ]


def _barely_stated(step: MeasuredStep) -> MeasuredStep:
    stated = step.cluster.software
    software = SoftwareConfig(framework=stated.framework)
    if stated.attention == "unfused":
        software = replace(software, attention="unfused")
    return replace(step, cluster=replace(step.cluster, software=software))


def reserved(step: MeasuredStep) -> float:
    """Bytes that the allocator of the fullest rank is predicted to hold."""
    work = make_workload(step.recipe, step.cluster.software.framework)
    micro_batches = step.layout.micro_batches(step.recipe.batch.global_size)[0]
    return MemoryModel(work, make_machine(step.cluster)).fullest(step.layout, micro_batches).reserved


def calibration_bars(draws: int) -> list[Bar]:
    """Three random runs of a group are given; the error of all others, averaged over the draws."""
    bars, shares = [], []
    print(f"\n{'step time, 3 runs given':32s}   n  MAPE   best  worst draw ({draws} draws), in the band")
    for group in CALIBRATED:
        found = [row for row in timed(rows(group)) if row.tier == "A"]
        results, inside = [], []
        for seed in range(draws):
            given = random.Random(seed).sample(found, 3)
            factors = fit([step_of(row) for row in given]).factors
            others = [row for row in found if row not in given]
            found_errors = [predict(step_of(r), factors) / (r.seconds or 1) - 1 for r in others]
            results.append(mape(found_errors))
            inside.append(mean(abs(error) <= CALIBRATED_BAND for error in found_errors))
        print(
            f"{group:30s} {len(found):5d} {mean(results):5.1f} {min(results):6.1f} {max(results):6.1f} "
            f"{100 * mean(inside):7.0f} %"
        )
        bars.append(Bar(f"{group}, calibrated MAPE", mean(results), 5.0, 5.0))
        shares.append(100 * (1 - mean(inside)))
    return [*bars, Bar("outside of the calibrated band, %", mean(shares), 10.0, 10.0)]


def counted(group: str, found: StageMemory) -> float:
    """Bytes of a stage by the definition of the group's source: the whole device (nvidia-smi), what the
    allocator holds (torch.cuda.max_memory_reserved, as torchtitan logs it), else the peak of what it gave
    out.

    BLOOM's were read by eye from nvidia-smi, which prints MiB, and noted in whole "GB" (thousands of MiB
    would be 4.9 % more than is taken here). The chronicle contradicts itself by more than the goal: one
    layout (181B, tp 4, pp 12, micro-batch 2) took 44 and 38 GB, another (182B, tp 8, pp 6, micro-batch 4) 59
    with 96 heads and 54 with 128, a third (196B, tp 8, pp 6) 65 with micro-batch 2 and 56 with 4. Least
    squares with constants for context, checkpoints and BF16 leaves 3.0 % even of the rows that it sees.
    Nanotron's and dgxc's are printed and not judged. Nanotron's "GB" are not told to be allocated or reserved
    (its logs have both, in GiB, of one rank), nor is recomputation told; 80B on pp 32 is said to take 1.9 GB
    less than on pp 16, though weights and states are 15e9 bytes less and activations in flight at most 6e9
    more. Dgxc's is one line of a log whose recomputation and format of gradients are not told.
    """
    if group == "bigscience_a100":
        return found.total
    return found.reserved if group == "torchtitan" else found.allocated


def memory_bars() -> list[Bar]:
    """Print the memory of all groups; return their bars."""
    by_group: dict[str, list[float]] = {}
    for row in rows():
        if not row.memory or row.suspect or row.id in NOT_COMPARABLE:
            continue
        work = make_workload(row.recipe, row.cluster.software.framework)
        model = MemoryModel(work, make_machine(row.cluster))
        micro_batches = row.layout.micro_batches(row.recipe.batch.global_size)[0]
        need = counted(row.group, model.fullest(row.layout, micro_batches))
        by_group.setdefault(row.group, []).append(need / row.memory - 1)
    print(f"\n{'memory':32s}   n  MAPE  median    bias")
    for group, found in by_group.items():
        middle = 100 * median(map(abs, found))
        print(f"{group:30s} {len(found):5d} {mape(found):5.1f} {middle:7.1f} {100 * mean(found):+7.1f}")
    return [
        Bar("memory, B200 peak allocations, MAPE", mape(by_group["simumax_b200"]), 1.6, 3.0),
        Bar("memory, zero-bubble runs, MAPE", mape(by_group["zero_bubble"]), 2.5, 3.0),
        Bar("memory, BLOOM, nvidia-smi, MAPE", mape(by_group["bigscience_a100"]), 3.8, 3.0),
        Bar("memory, torchtitan, reserved, MAPE", mape(by_group["torchtitan"]), 2.2, 3.0),
    ]


def ranking_bars() -> list[Bar]:
    """How much slower than the best measured layout the planner's first choice among the measured ones is.

    The sweep that it loses is decided by a run of vTrain with tp 2. Such runs are predicted 19 % too short
    (tp 4: 10 %, tp 8: 0.2 %), without a pattern: tp 2 of pp 8 on 512 GPUs takes 21.9 s and tp 8 of pp 2, with
    as many micro-batches and bytes to send and four times the all-reduces, 14.6 s; tp 4 of pp 16 takes what
    is predicted with micro-batch 4 and a quarter more with 12.
    """
    sweeps: dict[tuple[object, ...], list[Row]] = {}
    for row in timed(rows("bigscience_a100", "vtrain_multi_node")):
        model, batch = row.recipe.model, row.recipe.batch.global_size
        world = row.layout.world_size
        sweeps.setdefault((row.group, model.hidden, model.layers, model.heads, batch, world), []).append(row)
    bars = []
    print("\nranking: measured time of the predicted best over the best measured")
    for key, found in sweeps.items():
        if len(found) < 3:
            continue
        choice = min(found, key=lambda row: predict(step_of(row)))
        best = min(row.seconds or 0.0 for row in found)
        loss = 100 * ((choice.seconds or 0.0) / best - 1)
        print(f"  {key[0]} hidden {key[1]}, {key[5]} GPUs: {len(found)} layouts, {loss:.1f} % slower")
        bars.append(loss)
    return [
        Bar("ranking, mean loss of the first choice, %", mean(bars), 1.5, 3.0),
        Bar("ranking, largest loss of a first choice, %", max(bars), 9.2, 3.0),
    ]


def search_bars() -> list[Bar]:
    """CPU seconds of the search."""
    what, where = recipe(), a100()
    start = time.process_time()
    found = Search(Evaluator(make_workload(what), make_machine(where)), what, ANY_ENGINE).run(32)
    small = time.process_time() - start
    start = time.process_time()
    big = recipe(batch=4096)
    Search(Evaluator(make_workload(big), make_machine(a100(2048))), big, ANY_ENGINE).run(2048)
    large = time.process_time() - start
    print(f"\nsearch: GPT-175B on 256 GPUs, {found.evaluated} layouts, {found.fitting} fit")
    return [
        Bar("search, 256 GPUs, CPU seconds", small, 1.0, 1.0),
        Bar("search, microseconds a layout", 1e6 * small / found.evaluated, 50.0, 50.0),
        Bar("search, 16,384 GPUs, CPU seconds", large, 10.0, 10.0),
    ]


def main(draws: int = 10) -> int:
    """Print everything; 1 when a bar falls."""
    bars = [*step_bars(), *later_bars(), *unstated_bars(), *calibration_bars(draws)]
    bars += [*memory_bars(), *ranking_bars(), *search_bars()]
    print(f"\n{'bar':46s}  value    bar   goal")
    for bar in bars:
        word = "" if bar.value <= bar.goal else ("  goal missed" if bar.holds else "  FALLEN")
        print(f"{bar.name:46s} {bar.value:6.2f} {bar.bar:6.2f} {bar.goal:6.2f}{word}")
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
