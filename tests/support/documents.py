"""A small valid recipe and profile as text, and functions that break one line of them."""

from __future__ import annotations

RECIPE = """\
name: small
model:
  kind: llama
  layers: 4
  hidden: 64
  heads: 4
  kv_heads: 2
  vocab: 256
  sequence: 32
batch:
  global: 8
  micro: 2
parallel:
  dp: 2
  tp: 2
  pp: 2
learning_rate:
  peak: 3e-4
  warmup_steps: 2
train:
  steps: 10
"""

PROFILE = """\
name: small-cluster
nodes: 2
gpus_per_node: 4
accelerator: a100-80g-sxm
intra_node:
  kind: nvlink3
inter_node:
  data: {kind: ib-hdr, bandwidth: 400 Gb/s}
  control: {kind: tcp}
storage:
  path: /shared/runs
  bandwidth: 50 GB/s
backend:
  kind: slurm
"""


def changed(text: str, **replacements: str) -> str:
    """The text with the value of each key replaced (its first line `key: value`)."""
    for key, value in replacements.items():
        name = key.replace("_", "", 1) if key.startswith("_") else key
        lines = text.splitlines()
        index = next(i for i, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
        head = lines[index].split(":", 1)[0]
        lines[index] = f"{head}: {value}"
        text = "\n".join(lines) + "\n"
    return text


def without(text: str, key: str) -> str:
    """The text without the first line that starts with a key."""
    lines = text.splitlines()
    index = next(i for i, line in enumerate(lines) if line.strip().startswith(f"{key}:"))
    return "\n".join(lines[:index] + lines[index + 1 :]) + "\n"
