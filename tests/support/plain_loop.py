"""An independent reference: the same models and the same training, as one would write them in plain
PyTorch, in one process.

Nothing of the engine is used but the shape (`ModelConfig`) and the initial weights, which the caller hands
over by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.config.model import ModelConfig
from llmtrain.config.recipe import Recipe
from llmtrain.engine.data import Batch


class PlainBlock(nn.Module):
    """Pre-norm attention and feed-forward, batch first."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        hidden, width, ffn = model.hidden, model.head_dim, model.ffn_hidden
        make_norm = nn.LayerNorm if model.norm == "layernorm" else nn.RMSNorm
        self.attention_norm = make_norm(hidden, eps=model.norm_epsilon)
        self.ffn_norm = make_norm(hidden, eps=model.norm_epsilon)
        self.q = nn.Linear(hidden, model.heads * width, bias=model.qkv_bias)
        self.k = nn.Linear(hidden, model.kv_heads * width, bias=model.qkv_bias)
        self.v = nn.Linear(hidden, model.kv_heads * width, bias=model.qkv_bias)
        self.o = nn.Linear(model.heads * width, hidden, bias=model.bias)
        if model.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(width, eps=model.norm_epsilon) for _ in "qk")
        self.up = nn.Linear(hidden, ffn, bias=model.bias)
        if model.activation == "swiglu":
            self.gate = nn.Linear(hidden, ffn, bias=model.bias)
        self.down = nn.Linear(ffn, hidden, bias=model.bias)

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        batch, sequence, _ = x.shape
        normed = self.attention_norm(x)
        q, k, v = (
            project(normed).view(batch, sequence, -1, self.model.head_dim)
            for project in (self.q, self.k, self.v)
        )
        if self.model.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = turn(q, angles), turn(k, angles)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        repeat = self.model.heads // self.model.kv_heads
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        normed = self.ffn_norm(x)
        if self.model.activation == "swiglu":
            return x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + self.down(F.gelu(self.up(normed), approximate="tanh"))


class PlainModel(nn.Module):
    """Tokens [b, s] -> logits [b, s, vocab]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.positions = None if model.rope else nn.Embedding(model.sequence, model.hidden)
        self.blocks = nn.ModuleList(PlainBlock(model) for _ in range(model.layers))
        make_norm = nn.LayerNorm if model.norm == "layernorm" else nn.RMSNorm
        self.norm = make_norm(model.hidden, eps=model.norm_epsilon)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.angles = None
        if model.rope:
            steps = torch.arange(0, model.head_dim, 2).double() / model.head_dim
            frequencies = 1.0 / model.rope.theta**steps
            self.angles = torch.outer(torch.arange(model.sequence).double(), frequencies).float()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x, self.angles)
        return self.head(self.norm(x))


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions on [b, s, heads, d], as a product of complex numbers."""
    half = x.shape[-1] // 2
    values = torch.complex(x[..., :half].float(), x[..., half:].float())
    turned = values * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


def names(model: ModelConfig) -> dict[str, str]:
    """The engine's name of each of PlainModel's parameters."""
    table = {
        "embedding.weight": "embedding.weight",
        "norm.weight": "final_norm.weight",
        "norm.bias": "final_norm.bias",
    }
    table["positions.weight"] = "positions.weight"
    if not model.tie_embeddings:
        table["head.weight"] = "head.weight"
    for layer in range(model.layers):
        here, there = f"blocks.{layer}", f"layers.{layer}"
        for part in "qkvo":
            table[f"{here}.{part}.weight"] = f"{there}.attention.w{part}"
            table[f"{here}.{part}.bias"] = f"{there}.attention.b{part}"
        for part in ("gate", "up", "down"):
            table[f"{here}.{part}.weight"] = f"{there}.ffn.{part}"
            table[f"{here}.{part}.bias"] = f"{there}.ffn.{part}_bias"
        for norm in ("attention_norm", "ffn_norm"):
            table[f"{here}.{norm}.weight"] = f"{there}.{norm}.weight"
            table[f"{here}.{norm}.bias"] = f"{there}.{norm}.bias"
        for norm in ("q_norm", "k_norm"):
            table[f"{here}.{norm}.weight"] = f"{there}.attention.{norm}"
    return table


class PlainTraining:
    """BF16 or FP32 weights, FP32 masters and gradient sums, fused AdamW, clipping, warm-up and cosine."""

    def __init__(self, recipe: Recipe, initial: Mapping[str, Tensor], micro_batch: int) -> None:
        self.recipe, self.micro_batch = recipe, micro_batch
        self.model = PlainModel(recipe.model)
        table = names(recipe.model)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(initial[table[name]].view_as(parameter))
        self.masters = [parameter.detach().clone() for parameter in self.model.parameters()]
        if recipe.precision.mode == "bf16":
            self.model.to(torch.bfloat16)
        optimizer = recipe.optimizer
        matrices = [master for master in self.masters if master.dim() > 1]
        vectors = [master for master in self.masters if master.dim() == 1]
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": optimizer.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            fused=True,
        )

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 1."""
        config, steps = self.recipe.learning_rate, self.recipe.train.steps
        if step <= config.warmup_steps:
            return config.peak * step / config.warmup_steps
        if config.schedule == "constant":
            return config.peak
        final = config.peak * 0.1 if config.final is None else config.final
        done = (step - config.warmup_steps) / (steps - config.warmup_steps)
        return final + 0.5 * (config.peak - final) * (1 + math.cos(math.pi * done))

    def step(self, step: int, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
        """One step on [global, s] tokens; return (loss, gradient norm before clipping)."""
        parameters = list(self.model.parameters())
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        pieces = list(zip(tokens.split(self.micro_batch), targets.split(self.micro_batch), strict=True))
        total = 0.0
        for inputs, goals in pieces:
            logits = self.model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), goals.flatten()) / len(pieces)
            loss.backward()
            total += float(loss.detach())
            for parameter, master in zip(parameters, self.masters, strict=True):
                master.grad.add_(parameter.grad)
                parameter.grad = None
        limit = self.recipe.clip.norm or math.inf
        for master in self.masters:
            master.requires_grad_()
        norm = float(nn.utils.clip_grad_norm_(self.masters, limit))
        for master in self.masters:
            master.requires_grad_(False)
        for group in self.adamw.param_groups:
            group["lr"] = self.rate(step)
        self.adamw.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, self.masters, strict=True):
                parameter.copy_(master)
        return total, norm

    def run(self, fetch: Callable[[int], Batch], steps: int) -> tuple[list[float], list[float]]:
        """Losses and norms of the first steps; `fetch(step)` gives the global batch."""
        batches = (fetch(step) for step in range(1, steps + 1))
        results = [self.step(step, batch.tokens, batch.targets) for step, batch in enumerate(batches, 1)]
        return [loss for loss, _ in results], [norm for _, norm in results]
