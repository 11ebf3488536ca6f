"""The plan as `plan --json` prints it (architecture.md section 4)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llmtrain.config.layout import Layout
from llmtrain.plan.placement import placement_document
from llmtrain.plan.plan import Candidate, MemoryBytes, Plan, Prediction, Rung


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return the JSON-ready document of a plan."""
    return {
        "schema": 1,
        "model": {"parameters": plan.model.parameters, "flops_per_token": plan.model.flops_per_token},
        "plans": [candidate_document(candidate) for candidate in plan.plans],
        "placement": placement_document(plan.plans[0].layout, plan.gpus_per_node),
        "ladder": [_rung(rung) for rung in plan.ladder],
        "problems": [
            {"where": problem.where, "message": problem.message, "hint": problem.hint}
            for problem in plan.problems
        ],
        "evaluated": plan.evaluated,
        "refused": [asdict(group) for group in plan.refused],
        "pareto": [candidate_document(candidate) for candidate in plan.front],
        "reliability": asdict(plan.reliability),
        "proposals": [
            {"title": proposal.title, **candidate_document(proposal.candidate)} for proposal in plan.proposals
        ],
    }


def candidate_document(candidate: Candidate) -> dict[str, Any]:
    """Return the document of one layout with its batch split and prediction."""
    document: dict[str, Any] = {
        "layout": _layout(candidate.layout),
        "batch": {"global": candidate.global_batch, "accumulation": candidate.accumulation},
        "predicted": _prediction(candidate.predicted),
        "breakdown": asdict(candidate.parts),
    }
    if candidate.wire_bytes:
        document["wire_bytes"] = {axis: round(sent) for axis, sent in candidate.wire_bytes.items()}
    return document


def _layout(layout: Layout) -> dict[str, Any]:
    return asdict(layout)


def _prediction(predicted: Prediction) -> dict[str, Any]:
    document = {name: value for name, value in asdict(predicted).items() if name != "memory"}
    return {**document, "memory_bytes": _memory(predicted.memory)}


def _memory(memory: MemoryBytes) -> dict[str, float]:
    return {**{name: round(value) for name, value in asdict(memory).items()}, "total": round(memory.total)}


def _rung(rung: Rung) -> dict[str, Any]:
    document: dict[str, Any] = {"nodes": rung.nodes, "idle_nodes": rung.idle_nodes}
    document["micro_batches"] = list(rung.micro_batches)
    if rung.candidate is None:
        return {**document, "layout": None, "batch": None, "predicted": None}
    return {**document, **{k: v for k, v in candidate_document(rung.candidate).items() if k != "breakdown"}}
