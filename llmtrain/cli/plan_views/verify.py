"""`plan --verify`: the engine's real model counted in a process of its own, beside the prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmtrain.cli.console import columns, paint
from llmtrain.cli.engine_program import answer_of
from llmtrain.units import format_bytes

if TYPE_CHECKING:
    from llmtrain.config.job import JobSpec
    from llmtrain.plan.plan import Candidate

_KINDS = ("parameters", "gradients", "optimizer", "activations", "working")


def verify(spec: JobSpec, candidate: Candidate) -> list[dict[str, Any]]:
    """Counted and predicted bytes of the first, the fullest and the last stage.

    Raises RunError when the counting process fails.
    """
    from llmtrain.config.codec import to_json
    from llmtrain.plan.make import make_evaluator

    layout, micro_batches = candidate.layout, candidate.accumulation
    evaluator = make_evaluator(spec)
    stages = sorted({0, evaluator.fullest(layout, micro_batches).stage, layout.pp - 1})
    request = {
        "job": to_json(spec),
        "layout": to_json(layout),
        "stages": stages,
        "micro_batches": micro_batches,
    }
    answer = answer_of(
        "llmtrain.engine.verify_plan", request, task="counting the model's bytes", where="--verify"
    )
    found = []
    for counted in answer["stages"]:
        predicted = evaluator.memory_model.stage(layout, counted["stage"], micro_batches)
        told = {kind: getattr(predicted, kind) for kind in _KINDS}
        found.append({"stage": counted["stage"], "counted": counted, "predicted": told})
    return found


def verify_text(found: list[dict[str, Any]]) -> str:
    """A table: counted, predicted, difference."""
    rows = []
    for entry in found:
        for kind in (*_KINDS, "total"):
            counted, predicted = _of(entry["counted"], kind), _of(entry["predicted"], kind)
            gap = f"{100 * (predicted / counted - 1):+.2f} %" if counted else ""
            rows.append((str(entry["stage"]), kind, format_bytes(counted), format_bytes(predicted), gap))
    head = paint("The engine's real model, counted on the meta device", "bold")
    return (
        f"{head}\n{columns(('STAGE', 'KIND', 'COUNTED', 'PREDICTED', 'DIFFERENCE'), rows, right=(2, 3, 4))}"
    )


def _of(values: dict[str, float], kind: str) -> float:
    return sum(values[name] for name in _KINDS) if kind == "total" else values[kind]
