"""The loss scale follows PyTorch's own, and stays within its bounds."""

from __future__ import annotations

import random

import pytest
import torch

from llmtrain.config.numerics import LossScaleConfig
from llmtrain.engine.numerics.scaler import HIGHEST, LOWEST, LossScale

pytestmark = pytest.mark.engine


def trajectory(config: LossScaleConfig, overflows: list[bool]) -> list[float]:
    scale = LossScale(scale=config.initial)
    found = []
    for overflow in overflows:
        scale = scale.after(config, overflow=overflow)
        found.append(scale.scale)
    return found


def torch_trajectory(config: LossScaleConfig, overflows: list[bool]) -> list[float]:
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=config.initial,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.growth_steps,
    )
    weight = torch.nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([weight], lr=0.0)
    found = []
    for overflow in overflows:
        scaler.scale(weight.sum()).backward()
        if overflow:
            weight.grad[1] = torch.inf
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()
        found.append(scaler.get_scale())
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [0.0, 0.004, 0.02, 0.2])
def test_it_is_the_trajectory_of_grad_scaler(seed: int, share: float) -> None:
    draw = random.Random(seed)
    overflows = [draw.random() < share for _ in range(420)]
    config = LossScaleConfig(growth_steps=4 if share > 0.1 else 100)
    expected = torch_trajectory(config, overflows)
    inside = next((at for at, scale in enumerate(expected) if not LOWEST <= scale <= HIGHEST), len(expected))
    assert inside > 20
    assert trajectory(config, overflows)[:inside] == expected[:inside]


def test_it_stays_within_its_bounds_and_counts() -> None:
    config = LossScaleConfig(initial=2.0**22, growth_steps=2)
    assert max(trajectory(config, [False] * 50)) == trajectory(config, [False] * 50)[-1] == HIGHEST
    assert min(trajectory(config, [True] * 50)) == trajectory(config, [True] * 50)[-1] == LOWEST
    scale = LossScale(scale=16.0)
    for overflow in (True, False, True):
        scale = scale.after(config, overflow=overflow)
    assert (scale.overflows, scale.clean_steps, scale.scale) == (2, 0, LOWEST)
