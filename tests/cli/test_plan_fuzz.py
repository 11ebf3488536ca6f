"""Random recipes and profiles through `llmtrain plan`: a plan, or an error that says why; never a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain.cli.main import run
from tests.support.documents import PROFILE, RECIPE

SMALL = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])
DEGREE = st.sampled_from(["auto", 1, 2, 3, 4, 8])
OVERRIDES: dict[str, st.SearchStrategy] = {
    "model.kind": st.sampled_from(["gpt", "llama", "moe"]),
    "model.layers": st.integers(1, 9),
    "model.hidden": st.sampled_from([2, 48, 64, 128, 4096]),
    "model.heads": SMALL,
    "model.kv_heads": SMALL,
    "model.head_dim": st.sampled_from([1, 2, 7, 64]),
    "model.ffn_hidden": st.sampled_from([1, 2, 64, 100]),
    "model.vocab": st.sampled_from([256, 257, 50257, 2**53]),
    "model.sequence": st.sampled_from([1, 2, 7, 32, 4096]),
    "model.experts": SMALL,
    "model.experts_per_token": SMALL,
    "batch.global": st.sampled_from([1, 2, 7, 8, 32, 1000, 2**53]),
    "batch.micro": st.sampled_from(["auto", 1, 2, 3, "{max: 4}", "{min: 2, max: 2}"]),
    "batch.accumulation": st.sampled_from(["auto", 1, 2, 5]),
    "parallel.dp": DEGREE,
    "parallel.tp": DEGREE,
    "parallel.pp": DEGREE,
    "parallel.vpp": DEGREE,
    "parallel.cp": DEGREE,
    "parallel.ep": DEGREE,
    "parallel.zero": st.sampled_from(["auto", 0, 1, 2, 3]),
    "parallel.sequence_parallel": st.sampled_from(["auto", "true", "false"]),
    "parallel.schedule": st.sampled_from(["auto", "1f1b", "interleaved", "zero-bubble"]),
    "parallel.recompute": st.sampled_from(["auto", "none", "selective", "full"]),
    "precision.mode": st.sampled_from(["fp32", "tf32", "fp16", "bf16", "fp8"]),
    "faults.node_loss_budget": st.sampled_from([0, 0.2, 0.5, 0.99]),
    "train.tokens": st.sampled_from([1, "1M", "15T"]),
    "cluster.nodes": st.integers(1, 4),
    "cluster.gpus_per_node": SMALL,
    "cluster.spares": st.integers(0, 2),
    "cluster.accelerator": st.sampled_from(["cpu", "h100-sxm", "v100-32g-sxm"]),
    "cluster.inter_node.data.bandwidth": st.sampled_from(["1 MB/s", "1 PB/s"]),
    "cluster.inter_node.data.latency": st.sampled_from([0, "1h"]),
}


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data(), keys=st.sets(st.sampled_from(sorted(OVERRIDES)), max_size=8))
def test_plan_never_crashes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: st.DataObject,
    keys,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "c.yaml").write_text(PROFILE)
    overrides = [f"{key}={data.draw(OVERRIDES[key], label=key)}" for key in sorted(keys)]
    flags = [argument for text in overrides for argument in ("--set", text)]
    status = run(["plan", "r.yaml", "--cluster", "c.yaml", "--json", *flags])
    captured = capsys.readouterr()
    assert status in {0, 2, 3}, captured.err
    document = json.loads(captured.out)
    assert document["schema"] == 1
    if status == 0:
        assert document["plans"][0]["predicted"]["step_seconds"] > 0
    else:
        assert document["problems"]
