"""The parameters of one rank as sizes, in the order of the forward pass: what the engine's stages hold,
without building them."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.config.layout import Layout
from llmtrain.plan.memory.bucket_packing import Kind, ParameterShape
from llmtrain.plan.model_size import block_shape, is_tied
from llmtrain.plan.workload import Workload


def vocabulary_rows(vocab: int, size: int, index: int) -> tuple[int, int]:
    """First vocabulary row of a tensor-parallel rank, and how many it holds: equal shares, rounded up to 8
    rows where all ranks still get some, the last one shorter."""
    share = -(-vocab // size)
    rounded = -(-share // 8) * 8
    if rounded * (size - 1) < vocab:
        share = rounded
    first = min(index * share, vocab)
    return first, min(share, vocab - first)


def rank_chunks(work: Workload, layout: Layout, stage: int) -> Iterator[tuple[int, int]]:
    """(index among all chunks of the pipeline, layers) of each chunk of a pipeline rank."""
    counts = work.chunk_layers(layout)
    for index in range(stage, len(counts), layout.pp):
        yield index, counts[index]


def rank_parameters(work: Workload, layout: Layout, *, stage: int, tp_index: int) -> list[ParameterShape]:
    """Every parameter of a rank, a tied head only where it is another tensor than the embedding."""
    found: list[ParameterShape] = []
    last = layout.pp * layout.vpp - 1
    for chunk, (index, layers) in enumerate(rank_chunks(work, layout, stage)):
        builder = _Chunk(work, layout, chunk, tp_index)
        if index == 0:
            builder.embedding(shared=work.tied and last > 0)
        for _ in range(layers):
            builder.block()
        if index == last:
            builder.head(shared=work.tied and last > 0, own=not work.tied or last > 0)
        found += builder.shapes
    return found


class _Chunk:
    """Collects the parameters of one pipeline chunk."""

    def __init__(self, work: Workload, layout: Layout, chunk: int, tp_index: int) -> None:
        self.shapes: list[ParameterShape] = []
        self._work, self._layout, self._chunk = work, layout, chunk
        self._site = 0
        self._rows = vocabulary_rows(work.model.vocab, layout.tp, tp_index)[1]

    def _add(self, numel: int, kind: Kind = "plain", *, is_vector: bool = False) -> None:
        self.shapes.append(ParameterShape(numel, kind, is_vector, self._chunk, self._site))

    def _replicated(self, numel: int, *, is_vector: bool = True, always_partial: bool = False) -> None:
        """A tensor that all tensor-parallel ranks hold; in some cases each sees a part of its gradient."""
        layout = self._layout
        is_partial = layout.tp > 1 and (layout.sequence_parallel or always_partial)
        self._add(numel, "partial" if is_partial else "plain", is_vector=is_vector)

    def _norm(self) -> None:
        model = self._work.model
        layernorm = (model.norm or ("layernorm" if model.kind == "gpt" else "rmsnorm")) == "layernorm"
        for _ in range(2 if layernorm else 1):
            self._replicated(model.hidden)

    def embedding(self, *, shared: bool) -> None:
        """Tokens, and learned positions."""
        model = self._work.model
        self._add(self._rows * model.hidden, "shared" if shared else "plain")
        if model.rope is None:
            self._replicated(model.sequence * model.hidden, is_vector=False)
        self._site += 1

    def block(self) -> None:
        """One layer."""
        model, shape, tp = self._work.model, block_shape(self._work.model), self._layout.tp
        gpt = model.kind == "gpt"
        bias = gpt if model.bias is None else model.bias
        qkv_bias = bias if model.qkv_bias is None else model.qkv_bias
        heads, kv_heads = shape.heads // tp, max(1, shape.kv_heads // tp)
        rows = (heads + 2 * kv_heads) * shape.head_dim
        wide = (2 if shape.gated else 1) * (shape.ffn_hidden // tp)
        self._norm()
        self._add(rows * shape.hidden)
        if qkv_bias:
            self._add(rows, is_vector=True)
        self._add(shape.hidden * heads * shape.head_dim)
        if bias:
            self._replicated(shape.hidden)
        for _ in range(2 if model.qk_norm else 0):
            self._replicated(shape.head_dim, always_partial=True)
        self._norm()
        self._add(wide * shape.hidden)
        if bias:
            self._add(wide, is_vector=True)
        self._add(shape.hidden * (shape.ffn_hidden // tp))
        if bias:
            self._replicated(shape.hidden)
        self._site += 1

    def head(self, *, shared: bool, own: bool) -> None:
        """The last norm and the output head."""
        self._norm()
        self._site += 1
        if own:
            self._add(self._rows * self._work.model.hidden, "shared" if shared else "plain")


def is_tied_inside(work: Workload, layout: Layout) -> bool:
    """Whether embedding and head are one tensor of one rank."""
    return is_tied(work.model) and layout.pp * layout.vpp == 1
