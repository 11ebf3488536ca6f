"""Closed forms against an event-by-event play of the schedule."""

from __future__ import annotations

import pytest

from llmtrain.config.defaults import complete_model
from llmtrain.config.load import load_recipe
from llmtrain.plan.model_size import head_layers
from llmtrain.plan.timing.schedules import (
    bubble_ratio,
    micro_batches_in_flight,
    split_layers,
    stage_layer_counts,
)


def play_1f1b(stages: int, micro_batches: int) -> tuple[float, list[int]]:
    """Run 1F1B with passes of one time unit forward and two backward; return the idle share and peak in
    flight.
    """
    orders = []
    for stage in range(stages):
        warm = min(micro_batches, stages - stage - 1)
        order = [("f", i) for i in range(warm)]
        for i in range(micro_batches - warm):
            order += [("f", warm + i), ("b", i)]
        order += [("b", i) for i in range(micro_batches - warm, micro_batches)]
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    clocks, positions = [0.0] * stages, [0] * stages
    while any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        for stage in range(stages):
            while positions[stage] < len(orders[stage]):
                kind, index = orders[stage][positions[stage]]
                if kind == "f":
                    needed = ("f", stage - 1, index) if stage else None
                else:
                    needed = ("b", stage + 1, index) if stage < stages - 1 else ("f", stage, index)
                if needed is not None and needed not in done:
                    break
                start = max(clocks[stage], done[needed] if needed else 0.0)
                clocks[stage] = start + (1.0 if kind == "f" else 2.0)
                done[(kind, stage, index)] = clocks[stage]
                positions[stage] += 1
    peaks = []
    for order in orders:
        alive = peak = 0
        for kind, _ in order:
            alive += 1 if kind == "f" else -1
            peak = max(peak, alive)
        peaks.append(peak)
    return 1.0 - 3.0 * micro_batches / max(clocks), peaks


@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(2, 4), (4, 4), (4, 16), (8, 8), (8, 40), (4, 2), (1, 5)]
)
def test_1f1b_matches_the_played_schedule(stages, micro_batches):
    idle, peaks = play_1f1b(stages, micro_batches)
    assert bubble_ratio("1f1b", stages, 1, micro_batches) == pytest.approx(idle)
    assert [micro_batches_in_flight("1f1b", stages, 1, micro_batches, s) for s in range(stages)] == peaks


def test_the_reference_request_idles_three_sevenths():
    assert bubble_ratio("1f1b", 4, 1, 4) == pytest.approx(3 / 7)
    assert bubble_ratio("interleaved", 4, 6, 4) == pytest.approx(3 / 27)


def test_zero_bubble_h1_idles_a_third_as_much_fill():
    assert bubble_ratio("zero-bubble", 4, 1, 8) == pytest.approx(3 / 27)


def test_interleaving_holds_p_times_one_plus_the_published_penalty():
    """Korthikanti et al. 2022, section 4.2.3: stage 0 holds p (1 + (p - 1)/(p v)) micro-batches' worth."""
    for stages, chunks in ((8, 3), (35, 3), (4, 6)):
        expected = stages * (1 + (stages - 1) / (stages * chunks))
        assert micro_batches_in_flight("interleaved", stages, chunks, 10 * stages, 0) == pytest.approx(
            expected
        )


@pytest.mark.parametrize(("layers", "parts"), [(8, 4), (126, 64), (70, 12), (30, 8), (7, 3), (5, 5), (9, 2)])
def test_layers_are_split_evenly_and_the_ends_get_no_more(layers, parts):
    counts = split_layers(layers, parts)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    assert counts[0] <= max(counts)
    assert parts < 3 or counts[-1] <= max(counts[1:-1])


@pytest.mark.parametrize(
    ("layers", "stages", "head", "expected"),
    [
        (32, 4, 2.4, (8, 9, 9, 6)),  # Llama 3 8B: a vocabulary of 128,256 over a width of 4,096
        (96, 8, 0.35, (12,) * 8),  # GPT 175B: a stage with 13 would be slower than one with 12 and the head
        (8, 4, 9.0, (2, 3, 2, 1)),
        (126, 16, 1.0, (8, *[8] * 14, 6)),
    ],
)
def test_the_stage_with_the_head_gets_fewer_layers(layers, stages, head, expected):
    assert split_layers(layers, stages, 1, head) == expected


@pytest.mark.parametrize("layers", [24, 30, 47])
@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("head", [0.3, 1.2, 2.5, 5.0])
def test_no_other_split_makes_the_slowest_stage_faster(layers, stages, head):
    """Fewer than the slowest stage's load, on every stage, would leave layers over."""
    for chunks in (1, 2, 4):
        counts = stage_layer_counts(layers, stages, chunks, head)
        limit = max(*counts[:-1], counts[-1] + head) - 1e-9
        room = [int(limit)] * (stages - 1) + [int(limit - head)]
        assert sum(room) < layers or counts[-1] == chunks  # every chunk has one
        chunk_layers = split_layers(layers, stages, chunks, head)
        assert sum(chunk_layers) == layers
        assert min(chunk_layers) >= 1


def test_the_head_weighs_what_it_computes():
    """By hand, for Llama 3 8B: 2 x 128256 x 4096 FLOPs a token against 2 x 218 M and attention."""
    model = complete_model(load_recipe("llama-8b").model)
    width, ffn = model.hidden, model.ffn_hidden
    matrices = width * width * 2 + width * 1024 * 2 + 3 * width * ffn
    layer = 2 * matrices + 2 * model.sequence * width
    assert head_layers(model, "none") == pytest.approx(2 * model.vocab * width / layer)
    assert head_layers(model, "full") == pytest.approx(0.75 * head_layers(model, "none"))


def test_stages_of_an_interleaved_pipeline_own_every_pth_chunk():
    assert stage_layer_counts(24, 4, 3) == (6, 6, 6, 6)
    assert sum(stage_layer_counts(126, 8, 8)) == 126
