"""Real launches of a very small model through the command line, and what may be said of them afterwards."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmtrain.run.checkpoints.folder import list_checkpoints
from llmtrain.run.layout import RunDir

STEPS = 14
SMALL = (
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "model.kv_heads=2",
    "model.sequence=64",
    "batch.global=8",
    "batch.micro=1",
    "data.validation_every=0",
    "checkpoint.every_steps=3",
    "checkpoint.every=0",
    f"train.steps={STEPS}",
    "learning_rate.warmup_steps=2",
)
"""Turns `tiny` into a model whose steps take milliseconds."""
FOUR_RANKS = ("parallel.dp=2", "parallel.tp=1", "parallel.pp=2")
EIGHT_RANKS = ("parallel.dp=2", "parallel.tp=2", "parallel.pp=2")


def sets(*overrides: str) -> list[str]:
    """The same as command-line arguments."""
    return [word for override in overrides for word in ("--set", override)]


def start(folder: Path, *arguments: str, home: Path) -> subprocess.Popen[str]:
    """Start `llmtrain` in a folder, with a home of its own."""
    environment = {
        **os.environ,
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "llmtrain", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch(run: RunDir, *overrides: str, home: Path, options: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start `llmtrain launch tiny` as the small model into a run folder."""
    run.path.parent.mkdir(parents=True, exist_ok=True)
    arguments = ("launch", "tiny", "--run-dir", str(run.path), *options, *sets(*SMALL, *overrides))
    return start(run.path.parent, *arguments, home=home)


def end(process: subprocess.Popen[str], status: int, seconds: float = 240.0) -> tuple[str, str]:
    """Wait for a command; its standard output and error. Fails when its exit code is another one."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.kill()
        raise
    assert process.returncode == status, f"exit code {process.returncode}, not {status}:\n{out}\n{err}"
    return out, err


def weights(run: RunDir) -> dict[str, str]:
    """SHA-256 of every shard of the newest checkpoint, by name; its step under `step`."""
    checkpoint = list_checkpoints(run.checkpoints)[0]
    shards = sorted(checkpoint.path.glob("*.safetensors"))
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards}
    return {"step": str(checkpoint.step), **digests}
