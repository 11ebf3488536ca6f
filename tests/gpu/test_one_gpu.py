"""The engine on one CUDA GPU: `pytest tests/gpu` takes at most eight minutes there, and skips elsewhere.

Losses against the CPU, the speed and the memory of a model of about one billion parameters against the plan,
and what happens when memory runs out. Figures are printed (`pytest -s`) and written to GPU_FIGURES, if set.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmtrain.config.cluster import BackendConfig, ClusterProfile, LinkConfig, StorageConfig
from llmtrain.config.job import job_spec
from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from llmtrain.engine.build import Parts, build_parts
from llmtrain.engine.device import Device, choose_device
from llmtrain.engine.failures import error_class
from llmtrain.engine.loop import Loop, peak_flops
from llmtrain.engine.micro_batch import DeviceMeter, MicroBatchControl
from llmtrain.engine.model.block import _attend
from llmtrain.engine.model.documents import document_mask
from llmtrain.engine.saving import CheckpointFolder
from llmtrain.engine.step import StepResult, Wishes, train_step
from llmtrain.events.schema import MicroBatchChanged, StepFinished
from llmtrain.hardware import ACCELERATORS
from llmtrain.plan.make import make_evaluator
from llmtrain.plan.model_size import flops_per_token
from llmtrain.run.layout import RunDir
from tests.support.engine_cases import ZipfWindows, gpt, llama, recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]


def accelerator() -> str:
    """The hardware table's name of this GPU; skips when it has none."""
    name = torch.cuda.get_device_name(0)
    for word in ("H200", "H100", "A100", "L40", "A10", "V100"):
        found = [key for key in ACCELERATORS if key.startswith(word.lower())]
        if word in name and found:
            gigabytes = torch.cuda.mem_get_info(0)[1] / 1e9
            return min(found, key=lambda key: abs(ACCELERATORS[key].memory / 1e9 - gigabytes))
    pytest.skip(f"the hardware table does not know {name}")


def note(**figures: Any) -> None:
    """Print figures, and append them to the file that a person asked for."""
    print(figures)
    if path := os.environ.get("GPU_FIGURES"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")


def parts_on(device: Device, made: Recipe, layout: Layout) -> Parts:
    """A training on one device, its weights from the seed."""
    model = made.model
    windows = ZipfWindows(tokens=40 * (model.sequence + 1), vocab=model.vocab, pairs=False)
    parts = build_parts(made, layout, 0, device, train=[windows], validation=[])
    parts.buckets.initialise(made.train.seed)
    MADE.append(parts)
    return parts


MADE: list[Parts] = []


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """Leave the GPU as empty as it was found. By hand: a parameter whose hook knows its buckets is beyond
    Python's collector."""
    yield
    for parts in MADE:
        for bucket in parts.buckets.buckets:
            for kept in (bucket.parameters, bucket.gradients, bucket.own, bucket.master, bucket.reduced):
                if kept is not None:
                    kept.untyped_storage().resize_(0)
            for moment in (bucket.exp_avg, bucket.exp_avg_sq):
                moment.untyped_storage().resize_(0)
    MADE.clear()
    gc.collect()
    torch.cuda.empty_cache()


def billion() -> Recipe:
    """A Llama-style model of 1.0 B parameters."""
    shape = llama(
        layers=18,
        hidden=2048,
        heads=16,
        kv_heads=8,
        head_dim=128,
        ffn_hidden=5632,
        vocab=32_000,
        sequence=2048,
    )
    made = recipe(shape, mode="bf16", global_batch=16, steps=100)
    return replace(made, data=replace(made.data, validation_every=0))


# ---- parity ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "model", [llama(), llama(qk_norm=True, qkv_bias=True), gpt()], ids=["llama", "norms", "gpt"]
)
@pytest.mark.parametrize(
    ("mode", "recompute", "tolerance"),
    [
        ("fp32", "none", 1e-4),
        ("fp32", "selective", 1e-4),
        ("bf16", "full", 1e-2),
        ("bf16", "selective", 1e-2),
    ],
)
def test_losses_are_those_of_a_cpu(model: Any, mode: str, recompute: Any, tolerance: float) -> None:
    losses = []
    for device in (choose_device(0, "cpu"), choose_device(0, "any")):
        layout = Layout(micro_batch=2, recompute=recompute)
        parts = parts_on(device, recipe(model, mode=mode), layout)
        losses.append([train_step(parts, step, Wishes()).loss for step in range(1, 21)])
    deviation = max(abs(one - other) for one, other in zip(*losses, strict=True))
    note(test="parity", mode=mode, recompute=recompute, deviation=deviation)
    assert deviation < tolerance


@pytest.mark.parametrize(
    ("dtype", "masked"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)]
)
def test_grouped_attention_never_holds_all_scores(dtype: torch.dtype, masked: bool) -> None:
    """With the kernel that does forbidden, a fused one must take queries in groups, a mask, and FP32."""
    query, key = (torch.randn(256, 2, heads, 64, device="cuda", dtype=dtype) for heads in (8, 2))
    positions = torch.arange(256, device="cuda").remainder(100).expand(2, 256)
    mask = document_mask(positions) if masked else None
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        mixed = _attend(query, key, key, mask)
    expected = _attend(
        query.cpu().float(), key.cpu().float(), key.cpu().float(), None if mask is None else mask.cpu()
    )
    torch.testing.assert_close(mixed.cpu().float(), expected, atol=2e-2, rtol=2e-2)


def test_compiled_layers_train_alike() -> None:
    device, made = choose_device(0, "any"), recipe(llama(), mode="fp32", steps=5)
    compiled = replace(made, train=replace(made.train, compile=True))
    losses = []
    for one in (made, compiled):
        parts = parts_on(device, one, Layout(micro_batch=2))
        losses.append([train_step(parts, step, Wishes()).loss for step in range(1, 6)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_the_same_seed_gives_the_same_bits() -> None:
    runs = []
    for _ in range(2):
        parts = parts_on(choose_device(0, "any"), recipe(llama(), mode="bf16"), Layout(micro_batch=2))
        runs.append([train_step(parts, step, Wishes()).loss for step in range(1, 11)])
    assert runs[0] == runs[1]


def test_a_checkpoint_of_a_gpu_is_read_by_a_cpu(tmp_path: Path) -> None:
    made = recipe(llama(), mode="fp32", steps=10)
    first = parts_on(choose_device(0, "any"), made, Layout(micro_batch=2))
    folder = CheckpointFolder(tmp_path, "run", first, writer="attempt 1")
    progress = folder.restore("fresh")[0]
    for step in range(1, 6):
        train_step(first, step, Wishes())
    progress.step, progress.consumed_samples = 5, 40
    folder.save(progress)
    expected = train_step(first, 6, Wishes()).loss
    second = parts_on(choose_device(0, "cpu"), made, Layout(micro_batch=2))
    CheckpointFolder(tmp_path, "run", second, writer="attempt 2").restore("newest")
    assert train_step(second, 6, Wishes()).loss == pytest.approx(expected, abs=1e-4)


# ---- speed and memory --------------------------------------------------------------------------------------
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_speed_and_memory_of_a_billion_parameters(recompute: Any) -> None:
    name, made, device = accelerator(), billion(), choose_device(0, "any")
    layout = Layout(micro_batch=4, recompute=recompute)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    parts = parts_on(device, made, layout)
    results: list[StepResult] = [train_step(parts, step, Wishes()) for step in range(1, 9)]
    seconds = statistics.median(result.seconds for result in results[3:])
    tokens = made.batch.global_size * made.model.sequence
    mfu = tokens / seconds * flops_per_token(made.model) / float(peak_flops(name, "bf16") or 1.0)
    measured = torch.cuda.max_memory_allocated()
    cluster = ClusterProfile(
        name="one",
        nodes=1,
        gpus_per_node=1,
        accelerator=name,
        intra_node=LinkConfig(kind="nvlink4"),
        storage=StorageConfig(bandwidth=1e9),
        backend=BackendConfig(kind="local"),
    )
    evaluator = make_evaluator(job_spec(made, cluster))
    planned = evaluator.memory_model.stage(layout, 0, made.batch.global_size // 4)
    predicted = evaluator.candidate(layout).predicted
    note(
        test="speed",
        gpu=torch.cuda.get_device_name(0),
        recompute=recompute,
        mfu=mfu,
        planned_mfu=predicted.mfu,
        seconds=seconds,
        busy=results[-1].compute_seconds / results[-1].seconds,
        memory=measured,
        planned_memory=planned.allocated,
    )
    assert results[-1].loss < results[0].loss
    assert measured == pytest.approx(planned.allocated, rel=0.10)
    assert mfu > 0.75 * predicted.mfu


# ---- memory that runs out ----------------------------------------------------------------------------------
def test_out_of_memory_is_a_smaller_micro_batch(tmp_path: Path) -> None:
    """A micro-batch of 16 does not fit into what the allocator may use; the run goes on with less."""
    device, made = choose_device(0, "any"), billion()
    made = replace(made, batch=replace(made.batch, micro="auto"), train=replace(made.train, steps=3))
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(0)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, 36e9 / total))
    try:
        told: list[Any] = []
        parts = parts_on(device, made, Layout(micro_batch=16))
        checkpoints = CheckpointFolder(tmp_path / "checkpoints", "run", parts, writer="attempt 1")
        control = MicroBatchControl(parts, told.append, DeviceMeter(device, 36_000_000_000))
        progress = checkpoints.restore("fresh")[0]
        control.begin(RunDir(tmp_path), progress.extra, 0)
        loop = Loop(
            parts, checkpoints, told.append, should_stop=lambda: False, peak_flops=None, micro_batch=control
        )
        assert loop.run(progress) == "completed"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        rmtree(tmp_path / "checkpoints", ignore_errors=True)  # 12 GB, which pytest would keep for long
    changes = [event for event in told if isinstance(event, MicroBatchChanged)]
    note(test="out of memory", changes=[(event.before, event.micro_batch) for event in changes])
    assert changes and changes[0].before == 16
    assert len([event for event in told if isinstance(event, StepFinished)]) == 3


def test_the_error_is_known_for_what_it_is() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert error_class(raised.value) == "out_of_memory"


def test_a_step_waits_for_the_device_once() -> None:
    """Nothing waits in forward and backward passes: the host only waits for the agreed numbers."""
    parts = parts_on(choose_device(0, "any"), recipe(llama(), mode="bf16"), Layout(micro_batch=2))
    train_step(parts, 1, Wishes())
    batch = parts.batches.fetch(2).map(parts.device.upload)
    parts.buckets.begin_step(parts.batches.micro_batches, parts.batches.busiest)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts.passes.train(batch.tokens, batch.targets, 1.0, batch.positions)
        parts.buckets.finish_reduction()
    finally:
        torch.cuda.set_sync_debug_mode("default")
