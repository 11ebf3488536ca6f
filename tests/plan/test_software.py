"""Traits of training software that a profile leaves open."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from llmtrain.config.cluster import SoftwareConfig
from llmtrain.hardware import ACCELERATORS
from llmtrain.plan.machine import make_machine
from llmtrain.plan.software import Software, settle, usual
from tests.support.plans import a100


def test_a_profile_and_what_is_settled_have_the_same_traits():
    stated = [field.name for field in fields(SoftwareConfig)]
    assert stated == [field.name for field in fields(Software)]


def test_what_is_said_counts_even_where_it_denies():
    denied = SoftwareConfig(framework="megatron", overlap_gradients=False, overlap_tensor=0.0)
    found = settle(denied, ACCELERATORS["h100-sxm"])
    assert not found.overlap_gradients
    assert found.overlap_tensor == 0.0
    assert found.overlap_weights  # left open


@pytest.mark.parametrize(
    ("accelerator", "attention"),
    [("v100-32g-sxm", "unfused"), ("a100-80g-sxm", "flash2"), ("h100-sxm", "flash3"), ("gb200", "flash3")],
)
def test_attention_left_open_is_that_of_the_generation(accelerator: str, attention: str):
    assert usual("megatron", ACCELERATORS[accelerator]).attention == attention


@pytest.mark.parametrize("accelerator", ["cpu", "v100-32g-sxm", "a100-80g-sxm", "h100-sxm"])
def test_this_package_is_the_same_everywhere(accelerator: str):
    assert settle(SoftwareConfig(), ACCELERATORS[accelerator]) == Software()


def test_a_profile_without_traits_plans_for_this_engine():
    assert make_machine(a100()).software == Software()
    named = replace(a100(), software=SoftwareConfig(framework="fsdp"))
    assert make_machine(named).software.overlap_weights
