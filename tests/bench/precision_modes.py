"""Final losses of the precision modes side by side; `python -m tests.bench.precision_modes`.

The shipped tiny recipe on its default corpus, in one process, the same steps in every mode: FP16 with its
loss scale and BF16 must end within 1 % of FP32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from llmtrain.config.defaults import complete_recipe
from llmtrain.config.layout import Layout
from llmtrain.config.load import load_recipe
from llmtrain.corpus.corpora import open_corpora, prepare_corpora
from llmtrain.engine.build import Parts, build_parts
from llmtrain.engine.device import choose_device
from llmtrain.engine.step import Wishes, train_step, validate

LAST = 20
"""Steps whose mean loss is compared; single ones are noisy."""


def build_mode(mode: str, overrides: Sequence[str], storage: Path, device: str) -> Parts:
    """The tiny recipe, with some keys set, in one process."""
    recipe = complete_recipe(load_recipe("tiny", [f"precision.mode={mode}", *overrides]))
    file, _ = prepare_corpora(recipe, storage, progress=lambda _: None)
    corpora = open_corpora(file, recipe, storage)
    parts = build_parts(
        recipe,
        Layout(micro_batch=4),
        0,
        choose_device(0, device),
        train=corpora.train,
        validation=corpora.validation,
    )
    parts.buckets.initialise(recipe.train.seed)
    return parts


def run_mode(mode: str, overrides: Sequence[str], storage: Path, device: str = "cpu") -> dict[str, Any]:
    """Train; return losses, reactions and times."""
    parts = build_mode(mode, overrides, storage, device)
    losses: list[float] = []
    told: list[str] = []
    started = time.process_time()
    for step in range(1, parts.steps + 1):
        losses.append(train_step(parts, step, Wishes()).loss)
        told += [f"{step} {event}" for event in parts.guard.events if event.kind != "gradients_measured"]
        if step % 10 == 0:
            sys.stderr.write(f"{mode} {step} {losses[-1]:.4f} {parts.guard.state.scale}\n")
    found = validate(parts)
    return {
        "mode": mode,
        "loss": sum(losses[-LAST:]) / LAST,
        "validation_loss": None if found is None else found.loss,
        "scale": parts.guard.state.scale,
        "updates": parts.guard.state.updates,
        "seconds": time.process_time() - started,
        "told": told,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one JSON object a mode, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the recipe")
    parser.add_argument("--accelerator", default="cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as storage:
        for mode in options.modes:
            results.append(run_mode(mode, options.set, Path(storage), options.accelerator))
            sys.stdout.write(json.dumps(results[-1]) + "\n")
            sys.stdout.flush()
    for result in results[1:]:
        ratio = result["loss"] / results[0]["loss"] - 1
        sys.stdout.write(f"{result['mode']} ends {ratio:+.3%} from {results[0]['mode']}\n")


if __name__ == "__main__":
    main()
