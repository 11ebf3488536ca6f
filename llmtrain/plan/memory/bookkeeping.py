"""What training frameworks keep in memory beside the weights' formats: measured or read habits, not
physics.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookkeeping:
    """Habits of one framework."""

    reduced_shard: bool
    """Whether the reduced gradient shard is a buffer of its own beside the whole gradients."""
    logit_bytes: int
    """Bytes a logit at the peak of the loss: the logits, FP32 copies, the softmax, their gradient."""
    split_logit_bytes: int | None = None
    """The same where tensor-parallel ranks share the vocabulary; None: no difference."""
    gated_tensors: int
    """Tensors of the feed-forward width that a gated activation keeps: gate, up, product, and eager ones
    silu(gate).
    """
    rotated_copies: bool
    """Whether queries and keys are kept after rotation beside the projection they came from."""
    layer_scratch: bool
    """Whether a 2-byte scratch copy of one layer's weights stays allocated (placeholders of fused weight
    gradients).
    """
    receive_buffers: bool = False
    """Whether what a pipeline rank has received and not yet used is counted."""
    backward_buffers: bool = False
    """Whether what one layer's backward pass makes is counted: whole inputs, gradients of activations."""
    lean_selective: bool = False
    """Whether selective recomputation runs norms, rotary positions and the activation function again, but not
    the attention kernel."""
    half_gradients: bool = False
    """Whether half-precision gradients stay beside FP32 sums of them."""
    unscaled_shard: bool = False
    """Whether ZeRO-1 and 2 hold an FP32 copy of the reduced shard of half-precision gradients."""
    kept_outputs: bool = False
    """Whether a stage keeps its share of what it has sent until its backward pass."""
    whole_vectors: bool = False
    """Whether ZeRO-3 leaves norms and biases whole on every replica."""
    whole_reduction: bool = False
    """Whether ZeRO-1 and 2 reduce whole gradients to every replica instead of a shard to each."""
    loss_apart: bool = False
    """Whether the logits are gone before a layer's backward pass begins, so that only the larger of both
    counts."""
    logits_leave_holes: bool = False
    """Whether half-precision logits are freed before the backward pass of an FP32 loss, whose tensors then do
    not fit in their place."""
    fp32_parameters: bool = False
    """Whether ZeRO-3 shards FP32 parameters, which are their own master copy, and casts them to gather."""
    ends_stay_gathered: bool = False
    """Whether ZeRO-3 gathers embedding and head together, for the whole step."""
    prefetches: bool = False
    """Whether ZeRO-3 gathers the next layer beside one at work, through buffers of another stream, whose
    memory nothing else can use."""
    waits_in_pipelines: bool = False
    """Whether ZeRO-2 and 3 keep weights gathered and gradients whole until a pipeline's last micro-batch,
    instead of exchanging them in every micro-batch."""
    whole_inputs: bool = False
    """Whether products keep their inputs as gathered from the sequence-parallel ranks."""
    bucket_elements: float = 0.0
    """Gradients that are copied into one buffer to be reduced, and copied once more in half precision to be
    sent, or parameters to be gathered."""


BOOKKEEPING: dict[str, Bookkeeping] = {
    "llmtrain": Bookkeeping(
        reduced_shard=True,
        logit_bytes=12,
        gated_tensors=4,
        rotated_copies=True,
        layer_scratch=False,
        receive_buffers=True,
        whole_vectors=True,
        backward_buffers=True,
        lean_selective=True,
    ),
    "megatron": Bookkeeping(
        reduced_shard=False,
        logit_bytes=6,
        gated_tensors=3,
        rotated_copies=False,
        layer_scratch=True,
    ),
    # Backward through the loss: the log-softmax and two gradients in FP32; over shares of the vocabulary, one
    # more (torch.distributed.tensor.parallel.loss).
    "fsdp": Bookkeeping(
        reduced_shard=False,
        logit_bytes=12,
        split_logit_bytes=16,
        gated_tensors=4,
        rotated_copies=True,
        layer_scratch=False,
        loss_apart=True,
        logits_leave_holes=True,
        fp32_parameters=True,
        ends_stay_gathered=True,
        prefetches=True,
        waits_in_pipelines=True,  # torch.distributed.pipelining, stage.py
        whole_inputs=True,
    ),
    "deepspeed": Bookkeeping(
        reduced_shard=False,
        logit_bytes=10,
        gated_tensors=4,
        rotated_copies=True,
        layer_scratch=False,
        half_gradients=True,
        whole_reduction=True,
        unscaled_shard=True,
        kept_outputs=True,
        bucket_elements=5e8,
    ),
}
