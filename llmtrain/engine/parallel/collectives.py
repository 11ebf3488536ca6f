"""Every collective that autograd sees: the tensor-parallel linear layers, embedding and cross-entropy.

Shapes: s sequence, b micro-batch, h hidden, o output rows on this rank, i input columns on this rank, v
vocabulary rows on this rank, t = s x b tokens, n tensor-parallel degree. Activations are [s, b, h], or
[s/n, b, h] between layers under sequence parallelism. Column and row splits as in Shoeybi et al. 2019
(Megatron-LM), sequence parallelism as in Korthikanti et al. 2022: a layer needs two collectives forward and
two backward; under sequence parallelism each of them is a reduce-scatter and its all-gather, and the inputs
of the column-split layers, kept in parts, are gathered once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.engine.parallel.groups import DONE, Group, Pending


class WeightGradients:
    """Weight gradients put off by a zero-bubble schedule: the pass for inputs runs now, the pass for
    weights later."""

    def __init__(self, accumulate: Callable[[Tensor], None]) -> None:
        """`accumulate(parameter)` takes over `parameter.grad`."""
        self._accumulate = accumulate
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def put_off(self, weight: Tensor, gradient: Tensor, inputs: Tensor) -> None:
        """Remember the two factors of a weight's gradient."""
        # Detached: what autograd knows of them would keep all of the pass alive, down to its inputs.
        self._waiting.append((weight, gradient.detach(), inputs.detach()))

    def take(self) -> Callable[[], None]:
        """Return the work put off since the last call, as a function to run later."""
        waiting, self._waiting = self._waiting, []

        @torch.no_grad()
        def run() -> None:
            for weight, gradient, inputs in waiting:
                weight.grad = _weight_gradient(gradient, inputs)
                self._accumulate(weight)
            waiting.clear()

        return run


class TensorParallel:
    """What the layers of one stage need to know about their tensor-parallel group."""

    __slots__ = ("group", "put_off", "sequence_parallel")

    def __init__(self, group: Group, sequence_parallel: bool) -> None:
        self.group = group
        self.sequence_parallel = sequence_parallel and group.size > 1
        self.put_off: WeightGradients | None = None

    @property
    def size(self) -> int:
        """Tensor-parallel degree."""
        return self.group.size

    @property
    def index(self) -> int:
        """This rank's place in the group."""
        return self.group.index


def _weight_gradient(gradient: Tensor, inputs: Tensor) -> Tensor:
    """[s, b, o] x [s, b, i] -> [o, i]."""
    return gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)


def _finish_weight(ctx: Any, weight: Tensor, gradient: Tensor, inputs: Tensor) -> Tensor | None:
    put_off: WeightGradients | None = ctx.tp.put_off
    if put_off is None:
        return _weight_gradient(gradient, inputs)
    put_off.put_off(ctx.parameter, gradient, inputs)
    return None


class _ColumnLinear(torch.autograd.Function):
    """[s, b, h] (or [s/n, b, h]) -> [s, b, o]; the weight holds this rank's rows."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
        full = tp.group.all_gather(inputs) if tp.sequence_parallel else inputs
        ctx.tp, ctx.parameter, ctx.has_bias = tp, weight, bias is not None
        # This rank's part only: the whole is gathered again in the backward pass, for 1/n of the memory.
        ctx.save_for_backward(inputs, weight)
        return F.linear(full, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        tp: TensorParallel = ctx.tp
        full, gathering = inputs, DONE
        if tp.sequence_parallel:  # travels while this rank computes the inputs' gradient
            full = inputs.new_empty((tp.size * inputs.shape[0], *inputs.shape[1:]))
            gathering = tp.group.start_all_gather(full, inputs)
        to_inputs = gradient @ weight
        # The sum over the group travels while this rank computes the weight's gradient.
        pending: Pending
        if tp.sequence_parallel:
            whole, to_inputs = to_inputs, to_inputs.new_empty(inputs.shape)
            pending = tp.group.start_reduce_scatter(to_inputs, whole)
        else:
            pending = tp.group.start_all_reduce(to_inputs)
        gathering.wait()
        to_weight = _finish_weight(ctx, weight, gradient, full)
        to_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        pending.wait()
        return to_inputs, to_weight, to_bias, None


class _RowLinear(torch.autograd.Function):
    """[s, b, i] -> [s, b, h] (or [s/n, b, h]); the weight holds this rank's columns. The bias comes after
    the sum."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp, ctx.parameter = tp, weight
        ctx.save_for_backward(inputs, weight)
        partial = F.linear(inputs, weight)
        return tp.group.reduce_scatter(partial) if tp.sequence_parallel else tp.group.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        tp: TensorParallel = ctx.tp
        full = tp.group.all_gather(gradient.contiguous()) if tp.sequence_parallel else gradient
        return full @ weight, _finish_weight(ctx, weight, full, inputs), None


def column_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
    """Multiply by a weight whose rows are split over the group: [s, b, h] -> [s, b, o]. One collective,
    backward."""
    if tp.size == 1 and tp.put_off is None:
        return F.linear(inputs, weight, bias)
    return _ColumnLinear.apply(inputs, weight, bias, tp)


def row_linear(inputs: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    """Multiply by a weight whose columns are split over the group: [s, b, i] -> [s, b, h]. One collective,
    forward."""
    if tp.size == 1 and tp.put_off is None:
        return F.linear(inputs, weight)
    return _RowLinear.apply(inputs, weight, tp)


class _VocabularyEmbedding(torch.autograd.Function):
    """Tokens [s, b] -> [s, b, h] (or [s/n, b, h]); the weight holds this rank's vocabulary rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first: int, tp: TensorParallel) -> Tensor:
        foreign = (tokens < first) | (tokens >= first + weight.shape[0])
        local = (tokens - first).masked_fill_(foreign, 0)
        partial = F.embedding(local, weight).masked_fill_(foreign.unsqueeze(-1), 0)
        ctx.tp, ctx.rows = tp, weight.shape[0]
        ctx.save_for_backward(local, foreign)
        return tp.group.reduce_scatter(partial) if tp.sequence_parallel else tp.group.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        local, foreign = ctx.saved_tensors
        tp: TensorParallel = ctx.tp
        full = tp.group.all_gather(gradient.contiguous()) if tp.sequence_parallel else gradient
        full = full.masked_fill(foreign.unsqueeze(-1), 0)
        to_weight = torch.ops.aten.embedding_dense_backward(full, local, ctx.rows, -1, False)
        return None, to_weight, None, None


def vocabulary_embedding(tokens: Tensor, weight: Tensor, first: int, tp: TensorParallel) -> Tensor:
    """Look up [s, b] tokens in an embedding whose rows are split over the group; `first` is this rank's
    first row."""
    if tp.size == 1:
        return F.embedding(tokens, weight)
    return _VocabularyEmbedding.apply(tokens, weight, first, tp)


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Logits [t, v], targets [t] -> losses [t], FP32. The gradient is made forward, in place of the logits'
    softmax."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes by position)
        ctx: Any, logits: Tensor, targets: Tensor, first: int, tp: TensorParallel, z_loss: float
    ) -> Tensor:
        local = targets - first
        foreign = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill_(foreign, 0).unsqueeze(-1)
        values = logits.float()
        top = values.amax(-1)
        chosen = values.gather(-1, local).squeeze(-1).masked_fill_(foreign, 0.0)
        weights = (values - top.unsqueeze(-1)).exp_()
        total = weights.sum(-1)
        if tp.size > 1:
            # One gather of three numbers a token instead of a maximum and two sums.
            stats = tp.group.all_gather(torch.stack((top, total, chosen)).unsqueeze(0))
            all_top = stats[:, 0].amax(0)
            all_total = (stats[:, 1] * (stats[:, 0] - all_top).exp_()).sum(0)
            scale = (top - all_top).exp_().div_(all_total)
            top, total, chosen = all_top, all_total, stats[:, 2].sum(0)
        else:
            scale = total.reciprocal()
        log_total = total.log_().add_(top)
        # d(loss)/d(logits) = softmax (1 + 2 z log Z) - one-hot, where the z-loss is z log^2 Z.
        weights.mul_((scale if not z_loss else scale * (1.0 + 2.0 * z_loss * log_total)).unsqueeze(-1))
        # One index a row, so a plain scatter will do; scatter_add would not be deterministic on CUDA.
        owned = (~foreign).to(weights.dtype).unsqueeze(-1)
        weights.scatter_(-1, local, weights.gather(-1, local).sub_(owned))
        ctx.save_for_backward(weights.to(logits.dtype))
        losses = log_total - chosen
        return losses if not z_loss else losses.addcmul_(log_total, log_total, value=z_loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        (to_logits,) = ctx.saved_tensors
        return to_logits.mul_(gradient.unsqueeze(-1)), None, None, None, None


def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, first: int, tp: TensorParallel, z_loss: float = 0.0
) -> Tensor:
    """Cross-entropy of each token, [t] in FP32, from logits [t, v] whose columns are split over the group;
    with `z_loss` times the squared log of the softmax's denominator (Chowdhery et al. 2022, PaLM)."""
    return _VocabularyCrossEntropy.apply(logits, targets, first, tp, z_loss)
