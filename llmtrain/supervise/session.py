"""What one supervisor holds, and all of its attempts share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from llmtrain.backends.base import AllocationBackend, Backend
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.supervise.control import Control
from llmtrain.supervise.detection.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The run, the way to its nodes, how long things may take, and who may end it."""

    run: RunDir
    job: JobFile
    backend: Backend
    limits: Limits
    control: Control
    renew: Callable[[], None]
    """Called every second; raises LeaseLostError when the supervisor may not go on."""

    def environment(self) -> dict[str, str]:
        """Variables of this process that the profile has passed on to ranks."""
        names = self.job.spec.cluster.environment.pass_through
        return {name: os.environ[name] for name in names if name in os.environ}

    def orphan_command(self) -> tuple[str, ...]:
        """What an agent runs when its supervisor is gone; empty where no scheduler has to be told."""
        backend = self.backend
        return backend.orphan_command(self.run) if isinstance(backend, AllocationBackend) else ()
