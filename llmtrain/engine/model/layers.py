"""The column-parallel and row-parallel linear layers: which logical tensors they hold, and how they are
cut."""

from __future__ import annotations

from torch import Tensor, nn

from llmtrain.engine.model.parameters import LogicalTensor, ModelParameter, ParameterSpec
from llmtrain.engine.parallel.collectives import TensorParallel, column_linear, row_linear


class ColumnLinear(nn.Module):
    """One GEMM for several logical matrices side by side, each split by rows over the group: [s, b, h] ->
    [s, b, sum o]."""

    bias: ModelParameter | None

    def __init__(
        self,
        rows: dict[str, int],
        columns: int,
        tp: TensorParallel,
        *,
        std: float,
        bias_names: dict[str, str] | None,
    ) -> None:
        """`rows` maps each matrix's name to its global rows, which the degree must divide; `bias_names` its
        name to its bias's, or is None for no biases."""
        super().__init__()
        self.tp = tp
        self.widths = [count // tp.size for count in rows.values()]
        self.weight = ModelParameter(
            ParameterSpec(
                pieces=tuple(_cut(name, (count, columns), 0, tp, std) for name, count in rows.items()),
                decay=True,
            )
        )
        self.bias = None
        if bias_names is not None:
            pieces = tuple(_cut(bias_names[name], (count,), 0, tp, None) for name, count in rows.items())
            self.bias = ModelParameter(ParameterSpec(pieces=pieces, decay=False))

    def forward(self, inputs: Tensor) -> Tensor:
        """[s, b, h] (or [s/n, b, h] under sequence parallelism) -> [s, b, sum of this rank's rows]."""
        return column_linear(inputs, self.weight, self.bias, self.tp)


class RowLinear(nn.Module):
    """One GEMM whose columns are split over the group; its results are summed: [s, b, i] -> [s, b, h]."""

    bias: ModelParameter | None

    def __init__(
        self, name: str, rows: int, columns: int, tp: TensorParallel, *, std: float, bias_name: str | None
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = ModelParameter(
            ParameterSpec(pieces=(_cut(name, (rows, columns), 1, tp, std),), decay=True)
        )
        self.bias = None
        if bias_name is not None:
            piece = LogicalTensor(name=bias_name, shape=(rows,))
            self.bias = ModelParameter(
                ParameterSpec(pieces=(piece,), decay=False, partial_over_tp=tp.sequence_parallel)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """[s, b, i] -> [s, b, h] (or [s/n, b, h] under sequence parallelism)."""
        outputs = row_linear(inputs, self.weight, self.tp)
        return outputs if self.bias is None else outputs + self.bias


def _cut(
    name: str, shape: tuple[int, ...], split: int, tp: TensorParallel, std: float | None
) -> LogicalTensor:
    length = shape[split] // tp.size
    return LogicalTensor(name=name, shape=shape, split=split, start=tp.index * length, length=length, std=std)
