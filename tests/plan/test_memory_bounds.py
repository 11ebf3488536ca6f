"""The quick bounds that spare the search a look at every tensor never contradict that look."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.plan.make import make_plan
from llmtrain.plan.memory.model import MemoryModel

NARROW = ("model.heads=8", "model.hidden=512", "model.kv_heads=8", "model.ffn_hidden=512", "model.vocab=512")
CASES = [
    ("gpt-175b", "a100-32x8", ()),
    ("llama-8b", "a100-32x8", ()),
    ("llama-70b", "h100-32x8", ()),
    ("tiny", "local", ()),
    # Chunks of one layer: what is handed on between them is most of what there is.
    ("llama-8b", "local", (*NARROW, "model.layers=48", "batch.global=100")),
    ("llama-8b", "local", (*NARROW, "model.layers=31", "model.sequence=128", "model.tie_embeddings=true")),
    # Next to nothing but a vocabulary.
    ("llama-8b", "a100-32x8", (*NARROW, "model.layers=8", "model.vocab=256000", "precision.mode=fp32")),
    ("llama-8b", "a100-32x8", ("data.packing=documents", "parallel.gradient_communication=int8")),
]


@pytest.mark.parametrize(("recipe", "cluster", "changes"), CASES)
def test_need_lies_between(
    recipe: str, cluster: str, changes: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every layout that the search asks for, as if no bound could decide."""
    least, most, looked = MemoryModel.least, MemoryModel.most, set[Layout]()

    def no_bound(self: MemoryModel, layout: Layout, micro_batches: int) -> float:
        need = self.need(layout, micro_batches)
        assert least(self, layout, micro_batches) <= need <= most(self, layout, micro_batches), layout
        looked.add(layout)
        return 0.0

    monkeypatch.setattr(MemoryModel, "least", no_bound)
    plan = make_plan(resolve(recipe, cluster, changes))
    assert plan.plans
    assert len(looked) > 20
