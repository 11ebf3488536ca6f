"""Packed documents: each is trained on as if it were alone, on every layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.config.data import DataConfig
from llmtrain.config.layout import Layout
from llmtrain.engine.build import build_parts
from llmtrain.engine.device import choose_device
from llmtrain.engine.model.documents import document_mask
from llmtrain.engine.step import Wishes, train_step, validate
from tests.support.engine_cases import Case, Outcome, ZipfWindows, gpt, llama, recipe
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine
PACKED = DataConfig(packing="documents", validation_every=10, validation_sequences=5)


class ZipfDocuments(ZipfWindows):
    """Zipf tokens in documents of very different lengths, one token and several windows among them."""

    def __init__(self, tokens: int = 20_000, seed: int = 1) -> None:
        super().__init__(tokens, seed=seed)
        lengths = np.random.default_rng(seed).choice([1, 2, 7, 19, 64, 150], size=tokens)
        self.starts = np.concatenate(([0], np.cumsum(lengths)))

    def begins(self, index: int, sequence: int) -> Any:
        """See `corpus/samples.py`."""
        first = index * sequence
        inside = self.starts[(self.starts > first) & (self.starts <= first + sequence)]
        return inside - first


def packed(model: Any, layout: Layout, mode: str = "fp32") -> Case:
    return Case(replace(recipe(model, mode=mode, steps=3), data=PACKED), layout)


def run_packed(rank: int, world_size: int, cases: list[Case]) -> list[Outcome]:
    torch.manual_seed(rank)
    outcomes = []
    for case in cases:
        parts = build_parts(
            case.recipe,
            case.layout,
            rank,
            choose_device(0, "cpu"),
            train=[ZipfDocuments()],
            validation=[ZipfDocuments(2_000, seed=2)],
        )
        parts.buckets.initialise(case.recipe.train.seed)
        outcome = Outcome()
        for step in range(1, parts.steps + 1):
            result = train_step(parts, step, Wishes())
            outcome.losses.append(result.loss)
            outcome.norms.append(result.grad_norm)
            assert result.data_digest >= 0
        found = validate(parts)
        outcome.validation = None if found is None else found.loss
        outcomes.append(outcome)
    return outcomes


@pytest.mark.parametrize("model", [llama(qk_norm=True), gpt()], ids=["llama", "gpt"])
def test_a_packed_document_has_the_losses_and_gradients_of_one_alone(model: Any) -> None:
    case = packed(model, Layout())
    source = ZipfDocuments()
    parts = build_parts(case.recipe, Layout(), 0, choose_device(0, "cpu"), train=[source], validation=[])
    parts.buckets.initialise(3)
    (stage,) = parts.stages
    batch = parts.batches.fetch(1)
    assert batch.positions is not None
    assert (batch.positions == 0).sum() > 8, "several documents a sample"
    together = stage.losses(stage(batch.tokens, batch.positions), batch.targets)
    one = []
    for row in range(len(batch.tokens)):
        starts = [*torch.nonzero(batch.positions[row] == 0).flatten().tolist(), batch.tokens.shape[1]]
        for first, end in pairwise(starts):
            # Alone at the beginning of a sequence; what comes after it cannot be seen.
            alone = torch.zeros_like(batch.tokens[:1])
            targets = torch.full_like(alone, -1)
            alone[0, : end - first] = batch.tokens[row, first:end]
            targets[0, : end - first] = batch.targets[row, first:end]
            losses = stage.losses(stage(alone), targets)[: end - first, 0]
            torch.testing.assert_close(together[first:end, row], losses, atol=2e-5, rtol=1e-5)
            one.append(losses.sum())
    predicted = int((batch.targets >= 0).sum())
    assert batch.predicted == predicted < batch.targets.numel()
    weights = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    first_gradients = torch.autograd.grad(together.sum(), weights)
    second_gradients = torch.autograd.grad(torch.stack(one).sum(), weights)
    for first_one, second_one in zip(first_gradients, second_gradients, strict=True):
        torch.testing.assert_close(first_one, second_one, atol=2e-4, rtol=1e-3)


def test_the_last_token_of_a_document_predicts_nothing() -> None:
    case = packed(llama(), Layout())
    source = ZipfDocuments()
    parts = build_parts(case.recipe, Layout(), 0, choose_device(0, "cpu"), train=[source], validation=[])
    batch = parts.batches.fetch(3)
    assert batch.positions is not None
    ends = batch.positions[:, 1:] == 0
    assert torch.equal(batch.targets[:, :-1] < 0, ends)
    parts.buckets.initialise(3)
    (stage,) = parts.stages
    losses = stage.losses(stage(batch.tokens, batch.positions), batch.targets).t()
    assert bool((losses[batch.targets < 0] == 0).all())
    assert bool((losses[batch.targets >= 0] > 0).all())


def test_the_mask() -> None:
    mask = document_mask(torch.tensor([[0, 1, 0, 0, 1]]))[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_documents_count(tmp_path: Path) -> None:
    """The same tokens give other losses than as one stream."""
    (as_documents,) = run_packed(0, 1, [packed(llama(), Layout(micro_batch=2))])
    stream = replace(packed(llama(), Layout(micro_batch=2)).recipe, data=replace(PACKED, packing="stream"))
    (as_stream,) = run_packed(0, 1, [Case(stream, Layout(micro_batch=2))])
    assert abs(as_documents.losses[0] - as_stream.losses[0]) > 1e-4


MODELS = {"llama": llama(), "gpt": gpt()}
LAYOUTS = {
    2: [
        ("gpt", Layout(tp=2, sequence_parallel=True, recompute="selective")),
        ("gpt", Layout(pp=2, recompute="full")),
        ("llama", Layout(tp=2, sequence_parallel=True, recompute="selective")),
        ("llama", Layout(pp=2, vpp=2, schedule="interleaved")),
        ("llama", Layout(pp=2, schedule="zero-bubble")),
        ("llama", Layout(dp=2, micro_batch=2)),
    ],
    8: [("llama", Layout(dp=2, tp=2, pp=2, sequence_parallel=True, recompute="selective"))],
}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_layout_trains_alike(world_size: int, tmp_path: Path) -> None:
    cases = [packed(MODELS[name], layout) for name, layout in LAYOUTS[world_size]]
    wanted = sorted({name for name, _ in LAYOUTS[world_size]})
    found = run_packed(0, 1, [packed(MODELS[name], Layout()) for name in wanted])
    alone = dict(zip(wanted, found, strict=True))
    outcomes = run_ranks(run_packed, world_size, tmp_path, cases)[0]
    for (name, _), case, outcome in zip(LAYOUTS[world_size], cases, outcomes, strict=True):
        reference = alone[name]
        assert outcome.losses == pytest.approx(reference.losses, abs=2e-4), case.layout
        assert outcome.norms == pytest.approx(reference.norms, rel=3e-3), case.layout
        assert outcome.validation == pytest.approx(reference.validation, abs=2e-4), case.layout
