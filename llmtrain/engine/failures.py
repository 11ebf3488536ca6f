"""What an exception means to the supervisor: the `error_class` of `RankFailed`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from llmtrain.errors import CheckpointError, ConfigError, CorpusError, LlmtrainError, UsageError
from llmtrain.events.words import ErrorClass


class NumericError(LlmtrainError):
    """A loss or a gradient is not finite; raised on all ranks, before the weights change."""


class RestoreError(CheckpointError):
    """No state can be restored: what a CheckpointError said before the first step."""

    def __init__(self, cause: CheckpointError) -> None:
        super().__init__(str(cause))
        self.problems = cause.problems


class FailedInStep(Exception):
    """What training raised, and in which step."""

    def __init__(self, step: int, cause: BaseException) -> None:
        super().__init__(f"in step {step}")
        self.step, self.cause = step, cause


_COMMUNICATION_WORDS = ("gloo", "nccl", "connection", "process group", "collective", "store", "socket")


def error_class(error: BaseException) -> ErrorClass:
    """What the supervisor is told of an exception.

    Checkpoints that are damaged or of another run stay so (`checkpoint`); a file system that refuses to read
    them, or to take a new one, may recover (`storage`).
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out_of_memory"
    if isinstance(error, RestoreError):
        return "storage" if any(problem.may_pass for problem in error.problems) else "checkpoint"
    table: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], ErrorClass], ...] = (
        (NumericError, "numeric"),
        ((ConfigError, UsageError), "config"),
        (CheckpointError, "storage"),
        (CorpusError, "data"),
        (dist.DistError, "communication"),
    )
    for kinds, name in table:
        if isinstance(error, kinds):
            return name
    # The pipeline wraps what a stage raises, and gloo has no error type of its own.
    if isinstance(error.__cause__, Exception):
        return error_class(error.__cause__)
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        if "can't allocate memory" in text or "out of memory" in text:
            return "out_of_memory"
        if any(word in text for word in _COMMUNICATION_WORDS):
            return "communication"
    return "storage" if isinstance(error, OSError) else "user_code"


def describe(error: BaseException) -> str:
    """Type and message, on few lines."""
    text = error.text() if isinstance(error, LlmtrainError) else str(error)
    return f"{type(error).__name__}: {text.strip()}"[:2000]
