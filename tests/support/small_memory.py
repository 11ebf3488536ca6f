"""The engine on ranks with little memory: `python -m tests.support.small_memory <run>/job.json`.

From step 3 on, a forward pass of rank 1 with more than one sequence finds no memory, as an allocator says
it; all else is the engine's own process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from llmtrain.engine.__main__ import main

FULL_RANK, FIRST_STEP, MOST = "1", 3, 1


def shrink_memory() -> None:
    """Let the forward pass of a stage fail like an allocator."""
    import llmtrain.engine.step as step_module
    from llmtrain.engine.parallel.pipeline import PipelinePass, SinglePass

    now = {"step": 0}
    train_step = step_module.train_step

    def noting(parts: Any, step: int, wishes: Any) -> Any:
        now["step"] = step
        return train_step(parts, step, wishes)

    import llmtrain.engine.loop as loop_module

    loop_module.train_step = noting
    for kind in (SinglePass, PipelinePass):
        original = kind.train

        def limited(self: Any, tokens: Any, *rest: Any, original: Any = original) -> Any:
            layout = getattr(self, "_layout", None)
            size = layout.micro_batch if layout is not None else self._micro_batch
            if now["step"] >= FIRST_STEP and size > MOST:
                raise MemoryError(f"no room for micro-batches of {size}")
            return original(self, tokens, *rest)

        kind.train = limited  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RANK"] == FULL_RANK:
        shrink_memory()
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
