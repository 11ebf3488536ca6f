"""One stage as torch's pipeline schedules drive it: timed, and with receive buffers that come and go."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from llmtrain.engine.clock import Clock


class StageOwner(Protocol):
    """What a stage needs of the passes that it belongs to."""

    clock: Clock

    def new_activation(self) -> Tensor:
        """Room for what one stage hands to another."""
        ...

    def count_sent(self, operations: list[Any]) -> list[Any]:
        """Count what is about to be sent to a neighbour."""
        ...


class TimedStage(PipelineStage):
    """A pipeline stage whose passes are timed, and whose receive buffers live no longer than they are
    needed: torch would keep one for every micro-batch of a step, both ways."""

    passes: StageOwner

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        self.args_recv_info = {index: _unfilled(self.args_recv_info[0]) for index in range(num_microbatches)}

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        self.grad_recv_info = {index: _unfilled(self.grad_recv_info[0]) for index in range(num_microbatches)}

    def _get_recv_ops(self, recv_infos: Any) -> Any:
        for info in recv_infos:
            if not info.is_root_arg and info.tensor_meta is not None:
                info.buffer = self.passes.new_activation()
        return super()._get_recv_ops(recv_infos)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """What a forward pass hands on."""
        return self.passes.count_sent(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """What a backward pass hands back."""
        return self.passes.count_sent(super().get_bwd_send_ops(bwd_chunk_id))

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        self.args_recv_info[fwd_chunk_id] = _unfilled(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        self.grad_recv_info[bwd_chunk_id] = _unfilled(self.grad_recv_info[bwd_chunk_id])
        return received

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch forward."""
        work = partial(super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)
        return self.passes.clock.run("forward", self.stage_index, fwd_chunk_id, work)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch backward."""
        work = partial(super().backward_one_chunk, bwd_chunk_id, *args, **kwargs)
        return self.passes.clock.run("backward", self.stage_index, bwd_chunk_id, work)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The weight gradients of one micro-batch (zero bubble)."""
        work = partial(super().backward_weight_one_chunk, bwd_chunk_id, *args, **kwargs)
        return self.passes.clock.run("weight", self.stage_index, bwd_chunk_id, work)


def _unfilled(infos: Any) -> Any:
    """Copies of receive descriptions, without their buffers."""
    copies = tuple(copy(info) for info in infos)
    for info in copies:
        info.buffer = None
    return copies
