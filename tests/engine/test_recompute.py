"""Recomputation saves what it should, runs no linear layer or collective again, and changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmtrain.config.layout import Layout
from llmtrain.engine.step import Wishes, train_step
from tests.bench.recompute_memory import BARS, build, kept_bytes
from tests.support.engine_cases import Case, gpt, llama, recipe
from tests.support.engine_cases import build as build_case

pytestmark = pytest.mark.engine


def test_activation_memory_falls() -> None:
    kept = {mode: kept_bytes(build(mode, layers=2, sequence=64)) for mode in ("none", "selective", "full")}
    for mode, (least, _) in BARS.items():
        assert 1 - kept[mode] / kept["none"] >= least, mode
    assert kept["full"] < 0.2 * kept["none"]


@pytest.mark.parametrize(
    "model", [llama(), llama(qk_norm=True, qkv_bias=True), gpt()], ids=["llama", "norms", "gpt"]
)
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_selective_recomputation_gives_the_same_bits(model: Any, mode: str) -> None:
    torch.set_num_threads(1)
    found = []
    for recompute in ("none", "selective"):
        case = Case(recipe(model, mode=mode, steps=3), Layout(micro_batch=2, recompute=recompute))
        parts = build_case(case, 0)
        found.append([train_step(parts, step, Wishes()).grad_norm for step in (1, 2, 3)])
    if mode == "fp32" or model.activation == "gelu":
        assert found[0] == pytest.approx(found[1], rel=1e-6)
    else:  # SwiGLU's backward pass multiplies in another order.
        assert found[0] == pytest.approx(found[1], rel=2e-2)


def test_linear_layers_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward products of a step: as many with selective recomputation as without."""
    counts = []
    for recompute in ("none", "selective"):
        parts = build_case(Case(recipe(llama()), Layout(micro_batch=2, recompute=recompute)), 0)
        calls = 0
        original = torch.nn.functional.linear

        def counted(*arguments: Any, original: Any = original, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*arguments, **named)

        monkeypatch.setattr(torch.nn.functional, "linear", counted)
        train_step(parts, 1, Wishes())
        monkeypatch.setattr(torch.nn.functional, "linear", original)
        counts.append(calls)
    assert counts[0] == counts[1] > 0
