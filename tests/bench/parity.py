"""The table of parity: every axis pair and every option against one process; `python -m tests.bench.parity`.

All cases of one world size share one launch. A deviation is the largest difference of any of the 20 losses,
and of the validation loss, from the same training in one process; what one process does is held to a plain
PyTorch loop by `tests/engine/test_parity.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from llmtrain.config.layout import Layout
from tests.engine.test_parity import BF16_TOLERANCE, CASES, FP32_TOLERANCE, SPECIAL, bf16, fp32
from tests.support.engine_cases import Case, Outcome, gpt, llama, run_case, run_cases
from tests.support.ranks import run_ranks

COMPRESSED_TOLERANCE = 5e-2
"""Gradients in 8 bits or halves take another way down; 20 steps at a high rate are all that is compared."""


def sent_as(case: Case, form: str) -> Case:
    """The case with gradients that travel in another format."""
    parallel = replace(case.recipe.parallel, gradient_communication=form)  # type: ignore[arg-type]
    return replace(case, recipe=replace(case.recipe, parallel=parallel))


MORE: dict[str, Case] = {
    "dp2 tp2": fp32(llama(), dp=2, tp=2),
    "dp2 tp2 sp zero3": fp32(llama(), dp=2, tp=2, sequence_parallel=True, zero=3),
    "dp2 tp2 selective zero2": fp32(gpt(), dp=2, tp=2, recompute="selective", zero=2),
    "dp2 pp2 zero-bubble": fp32(llama(), dp=2, pp=2, schedule="zero-bubble", micro_batch=1),
    "dp2 pp2 selective": fp32(gpt(), dp=2, pp=2, recompute="selective"),
    "tp2 pp2 full sp": fp32(llama(), tp=2, pp=2, sequence_parallel=True, recompute="full"),
    "tp2 pp2 selective zero-bubble": fp32(SPECIAL, tp=2, pp=2, recompute="selective", schedule="zero-bubble"),
    "tp2 pp2 vpp2": fp32(llama(), tp=2, pp=2, vpp=2, schedule="interleaved"),
    "pp4 interleaved": fp32(llama(layers=8), pp=4, vpp=2, schedule="interleaved", micro_batch=1),
    "pp4 zero-bubble": fp32(gpt(), pp=4, schedule="zero-bubble", micro_batch=1),
    "dp4 zero2": fp32(llama(), dp=4, zero=2, micro_batch=1),
    "dp4 zero3 full": fp32(gpt(), dp=4, zero=3, micro_batch=1, recompute="full"),
    "tp2 selective sp": fp32(SPECIAL, tp=2, sequence_parallel=True, recompute="selective"),
    "kv_heads 1 tp1 dp2": fp32(llama(kv_heads=1), dp=2),
    "dp3 pp2 uneven": fp32(llama(), dp=3, pp=2, micro_batch=1),
    "dp3 pp2 uneven zero-bubble": fp32(gpt(), dp=3, pp=2, schedule="zero-bubble", micro_batch=1),
    "dp3 tp2 uneven": fp32(llama(), dp=3, tp=2, micro_batch=1),
    "dp2 bf16 zero3 selective": bf16(llama(), dp=2, zero=3, recompute="selective"),
    "dp2 sent as bf16": sent_as(fp32(llama(), dp=2), "bf16"),
    "dp2 sent as fp16": sent_as(fp32(llama(), dp=2), "fp16"),
    "dp2 sent as int8": sent_as(fp32(llama(), dp=2), "int8"),
}


def tolerance_of(case: Case) -> float:
    """Largest deviation that rounding explains."""
    if case.recipe.parallel.gradient_communication != "fp32":
        return COMPRESSED_TOLERANCE
    return BF16_TOLERANCE if case.recipe.precision.mode != "fp32" else FP32_TOLERANCE


@cache
def alone(case: Case) -> Outcome:
    """The same training in one process."""
    return run_case(0, sent_as(replace(case, layout=Layout(micro_batch=case.layout.micro_batch)), "fp32"))


def deviation(case: Case, found: Outcome) -> float:
    """Largest difference of a loss from one process."""
    expected = alone(replace(case, ranks_per_node=0))
    pairs: list[tuple[Any, Any]] = list(zip(found.losses, expected.losses, strict=True))
    if found.validation is not None and expected.validation is not None:
        pairs.append((found.validation, expected.validation))
    return float(max(abs(one - other) for one, other in pairs))


def main() -> int:
    """Print the table; return 1 when a case deviates more than rounding explains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of the names of cases")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = {name: case for name, case in {**CASES, **MORE}.items() if arguments.only in name}
    wrong = 0
    sys.stdout.write(f"{'case':36} {'ranks':>5} {'deviation':>10} {'limit':>8}\n")
    with tempfile.TemporaryDirectory() as folder:
        for size in sorted({case.layout.world_size for case in cases.values()} - {1}):
            names = [name for name, case in cases.items() if case.layout.world_size == size]
            chosen = [cases[name] for name in names]
            found = run_ranks(run_cases, size, Path(folder), chosen, timeout=1800.0)[0]
            for name, outcome in zip(names, found, strict=True):
                off, limit = deviation(cases[name], outcome), tolerance_of(cases[name])
                wrong += not off <= limit
                sys.stdout.write(f"{name:36} {size:5} {off:10.2e} {limit:8.0e}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(cases)} cases, {wrong} beyond their limit\n")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
