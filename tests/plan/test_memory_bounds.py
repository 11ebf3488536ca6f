"""The quick bounds that spare the search a look at every tensor never contradict that look."""

from __future__ import annotations

import pytest

from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.plan.make import make_plan
from llmtrain.plan.memory import MemoryModel


@pytest.mark.parametrize(
    ("recipe", "cluster"),
    [("gpt-175b", "a100-32x8"), ("llama-8b", "a100-32x8"), ("llama-70b", "h100-32x8"), ("tiny", "local")],
)
def test_need_lies_between(recipe: str, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every layout that the search asks for, as if no bound could decide."""
    least, most, looked = MemoryModel.least, MemoryModel.most, set[Layout]()

    def no_bound(self: MemoryModel, layout: Layout, micro_batches: int) -> float:
        need = self.need(layout, micro_batches)
        assert least(self, layout, micro_batches) <= need <= most(self, layout, micro_batches), layout
        looked.add(layout)
        return 0.0

    monkeypatch.setattr(MemoryModel, "least", no_bound)
    plan = make_plan(resolve(recipe, cluster, []))
    assert plan.plans
    assert len(looked) > 20
