"""What one transformer block of this engine keeps for its backward pass, and what comes and goes in that
pass: the engine's tensors, one after the other, as sizes.

A twin of `engine/model/block.py` and `engine/parallel/collectives.py`, held against them by
`plan --verify`: where a tensor appears or goes there, it does so here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmtrain.config.layout import Layout
from llmtrain.plan.workload import Workload


@dataclass(slots=True)
class Ledger:
    """Bytes alive, and the most that were at once."""

    now: float = 0.0
    peak: float = 0.0

    def take(self, size: float) -> None:
        """Something is allocated."""
        self.now += size
        if self.now > self.peak:  # noqa: PLR1730 (quicker than max(), and called most of all)
            self.peak = self.now

    def free(self, size: float) -> None:
        """Something is freed."""
        self.now -= size

    def touch(self, size: float) -> None:
        """Something is allocated, and freed soon."""
        if self.now + size > self.peak:  # noqa: PLR1730
            self.peak = self.now + size


Arrive = Callable[[float], None]
"""Told of each weight gradient when it has come, with its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Bytes of the tensors of one block, for one micro-batch on one rank."""

    element: int
    whole: float
    """Hidden state of all the sequence."""
    own: float
    """The same of this rank's part of the sequence."""
    query: float
    key: float
    packed: float
    """Queries, keys and values side by side."""
    rows: float
    """One FP32 number of each query row."""
    inner: float
    """One tensor of the feed-forward width."""
    wide: float
    """What the first feed-forward product makes: one or two of those."""
    statistics: float
    """What a norm keeps beside its input."""
    bias: float
    """A mask of documents, as numbers to add to the scores."""
    down: float
    into: float
    out: float
    qkv: float
    row_bias: int
    """Elements of a bias or a norm whose gradient travels with the matrices'; 0: none, or it does not."""
    into_bias: int
    qkv_bias: int
    norm_vectors: int
    is_rms: bool
    is_rotated: bool
    has_head_norms: bool
    is_gated: bool
    gathers: bool
    """Whether the sequence is gathered before products: sequence parallelism."""
    recompute: str
    puts_off: bool
    """Whether weight gradients are put off: zero bubble."""

    # ---- kept --------------------------------------------------------------------------------------------
    def kept(self, recompute: str | None = None) -> float:
        """Bytes kept from the forward to the backward pass, the block's input among them."""
        recompute = recompute or self.recompute
        if recompute == "full":
            return self.own
        core = self.packed + self.query + self.rows + self._head_statistics + self.bias
        if recompute == "selective":
            return 2 * self.own + 2 * self.statistics + core + self.wide
        turned = self.query + self.key if self.is_rotated or self.has_head_norms else 0.0
        feed_forward = self.wide + self.inner + (self.inner if self.is_gated else 0.0)
        return 4 * self.own + 2 * self.statistics + core + turned + feed_forward

    @property
    def put_off(self) -> float:
        """Bytes that wait for the weight gradients: both factors of each of the four."""
        return 4 * self.whole + self.inner + self.wide + self.query + self.packed

    @property
    def _head_statistics(self) -> float:
        return self.rows * (1 + self.key / self.query) if self.has_head_norms else 0.0

    # ---- backward ----------------------------------------------------------------------------------------
    def backward(self, ledger: Ledger, arrive: Arrive, *, lent: bool = False) -> None:
        """The backward pass: begins with the gradient of the output alive and what was kept, ends with the
        gradient of the input. `lent`: somebody else holds the former, too."""
        if self.recompute == "full":
            ledger.take(self.kept("none") - self.own)
        if self.recompute == "selective":
            ledger.touch(self.inner + (self.inner if self.is_gated else 0.0))
            ledger.take(self.inner)
        vector = arrive if self.row_bias else _nothing
        vector(0.0)
        self._row(ledger, self.inner, self.down, frees=self.inner)
        arrive(self.down)
        self._activation(ledger)
        self._column(ledger, self.wide, self.into)
        self._arrive(arrive, self.into, self.into_bias)
        self.norm(ledger)
        self._keep_apart(ledger, lent=lent)
        vector(0.0)
        self._row(ledger, self.query, self.out, frees=0.0)
        arrive(self.out)
        self._core(ledger)
        self._column(ledger, self.packed, self.qkv)
        self._arrive(arrive, self.qkv, self.qkv_bias)
        self.norm(ledger)
        self._keep_apart(ledger)

    def _arrive(self, arrive: Arrive, weight: float, bias: int) -> None:
        """The gradients of a column-split layer, and of the norm before it."""
        for size in (weight,) * bool(bias) + (weight,) + (0.0,) * bool(self.norm_vectors):
            arrive(size)

    def gradients(self) -> list[float]:
        """Elements of the gradients in the order in which the backward pass makes them."""
        down, into, out, qkv = (size / self.element for size in (self.down, self.into, self.out, self.qkv))
        found = (
            *(self.row_bias, down, self.into_bias, into, self.norm_vectors),
            *(self.row_bias, out, self.qkv_bias, qkv, self.norm_vectors),
        )
        return [float(elements) for elements in found if elements]

    def _keep_apart(self, ledger: Ledger, *, lent: bool = False) -> None:
        """A gradient that others need as it is cannot be added to: the sum is another tensor."""
        if lent or (self.puts_off and not self.gathers):
            ledger.take(self.own)

    def _row(self, ledger: Ledger, inputs: float, weight: float, *, frees: float) -> None:
        """Of down and out: the gradient of the output stays for the residual stream."""
        gathered = self.whole if self.gathers else 0.0
        ledger.take(gathered + inputs)
        if self.puts_off:
            return
        ledger.touch(weight)
        ledger.free(gathered + frees)

    def _column(self, ledger: Ledger, gradient: float, weight: float) -> None:
        """Of into and qkv: the gradient of the output goes, that of the input comes."""
        if self.recompute == "selective":
            self._norm_forward(ledger)
        gathered = self.whole if self.gathers else 0.0
        ledger.take(gathered + self.whole + (self.own if self.gathers else 0.0))
        if self.gathers:
            self._after_sum(ledger, weight, gathered)
        elif not self.puts_off:
            ledger.touch(weight)
        if self.puts_off:
            ledger.free(self.own if self.gathers else 0.0)
            return
        ledger.free(gradient + self.own)

    def _after_sum(self, ledger: Ledger, weight: float, gathered: float) -> None:
        if not self.puts_off:
            ledger.touch(weight)
            ledger.free(gathered)
        ledger.free(self.whole)

    def _activation(self, ledger: Ledger) -> None:
        inner, wide = self.inner, self.wide
        if not self.is_gated:
            ledger.take(inner)
            ledger.free(inner + wide)
        elif self.recompute == "selective":
            ledger.touch(wide + 2 * inner)
            ledger.take(wide)
            ledger.free(inner + wide)
        else:
            ledger.take(2 * inner)
            ledger.free(2 * inner)
            ledger.take(inner)
            ledger.free(inner + wide)
            ledger.take(wide)
            ledger.free(2 * inner)

    def _core(self, ledger: Ledger) -> None:
        """Attention, and what turned queries and keys."""
        is_turned = self.is_rotated or self.has_head_norms
        turned = self.query + self.key if is_turned else 0.0
        if self.recompute == "selective" and is_turned:
            self._turn(ledger, self.query)
            self._turn(ledger, self.key)
        ledger.take(self.packed)
        ledger.free(turned + self.query + self.rows + self.bias)
        ledger.free(0.0 if self.puts_off else self.query)
        if not self.has_head_norms:
            ledger.free(self.packed)
        if self.is_rotated:
            for size in (self.key, self.query):
                self._turn(ledger, size)
                ledger.free(size)
        if self.has_head_norms:
            for size in (self.key, self.query):
                ledger.touch(3 * self._fp32(size))
            ledger.free(self.packed + self._head_statistics)
        ledger.take(self.packed)
        ledger.free(self.packed)

    def _turn(self, ledger: Ledger, size: float) -> None:
        """Rotary positions, computed in FP32."""
        copies = self._fp32(size) if self.element < 4 else 0.0
        ledger.touch(copies + size + self._fp32(size) / 2)
        ledger.take(size)

    # ---- norms -------------------------------------------------------------------------------------------
    def norm(self, ledger: Ledger) -> None:
        """The backward pass of a norm: the gradient of its output becomes that of its input, and is added to
        the residual stream's; its input goes, too."""
        if self.is_rms:
            ledger.touch(3 * self._fp32(self.own))
        ledger.take(self.own)
        ledger.free(3 * self.own + self.statistics)

    def _norm_forward(self, ledger: Ledger) -> None:
        if self.is_rms:
            ledger.touch(2 * self._fp32(self.own) + (self.own if self.element < 4 else 0.0))
        ledger.take(self.own)

    def _fp32(self, size: float) -> float:
        return size * 4 / self.element


def block_bytes(work: Workload, layout: Layout) -> BlockBytes:
    """The sizes of a workload's blocks under a layout."""
    shape, element, tp = work.shape, work.activation_bytes, layout.tp
    tokens = layout.micro_batch * work.sequence
    whole = float(element * tokens * shape.hidden)
    parts = tp if layout.sequence_parallel else 1
    query = element * tokens * shape.heads * shape.head_dim / tp
    key = element * tokens * shape.kv_heads * shape.head_dim / tp
    inner = element * tokens * shape.ffn_hidden / tp
    wide = (2 if shape.gated else 1) * inner
    products = shape.hidden / tokens
    vectors = layout.zero < 3
    replicated = vectors and not (layout.sequence_parallel and tp > 1)
    bias = work.model.kind == "gpt" if work.model.bias is None else work.model.bias
    qkv_bias = bias if work.model.qkv_bias is None else work.model.qkv_bias
    return BlockBytes(
        element=element,
        whole=whole,
        own=whole / parts,
        query=query,
        key=key,
        packed=query + 2 * key,
        rows=4.0 * tokens * shape.heads / tp,
        inner=inner,
        wide=wide,
        statistics=(4.0 if work.is_rms_norm else 8.0) * tokens / parts,
        bias=float(element * layout.micro_batch * work.sequence**2) if work.packs_documents else 0.0,
        down=inner * products,
        into=wide * products,
        out=query * products,
        qkv=(query + 2 * key) * products,
        row_bias=shape.hidden * (bias and replicated),
        into_bias=round(wide / (element * tokens)) * (bias and vectors),
        qkv_bias=round((query + 2 * key) / (element * tokens)) * (qkv_bias and vectors),
        norm_vectors=shape.hidden * (1 if work.is_rms_norm else 2) * replicated,
        is_rms=work.is_rms_norm,
        is_rotated=work.model.rope is not None,
        has_head_norms=bool(work.model.qk_norm),
        is_gated=shape.gated,
        gathers=layout.sequence_parallel and tp > 1,
        recompute=layout.recompute,
        puts_off=layout.schedule == "zero-bubble" and layout.pp > 1,
    )


def _nothing(_: float) -> None:
    """A gradient that goes elsewhere."""
