"""The planner: arithmetic on a job spec, without torch. `make_plan(spec)` is the way in."""

from llmtrain.plan.document import plan_document
from llmtrain.plan.make import make_plan
from llmtrain.plan.model_size import flops_per_token, model_size
from llmtrain.plan.plan import Candidate, MemoryBytes, ModelSize, Plan, Prediction, Rung

__all__ = [
    "Candidate",
    "MemoryBytes",
    "ModelSize",
    "Plan",
    "Prediction",
    "Rung",
    "flops_per_token",
    "make_plan",
    "model_size",
    "plan_document",
]
