"""Lookouts: on two nodes of a job beside the supervisor's, a process that notices when that one is lost.

While an attempt runs, its agents notice. Between two attempts there are none, and the job would go on with
nobody in charge until its time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from llmtrain.transport.base import Channel, Transport, TransportError

COUNT = 2
"""The supervisor's node and one of these may be lost together."""


class Lookouts:
    """The lookouts of one supervisor; they leave by themselves when it does (`slurm.end --watch`)."""

    def __init__(self, command: Sequence[str], transport: Callable[[str], Transport], log: Path) -> None:
        self._command, self._transport, self._log = command, transport, log
        self._channels: dict[str, Channel] = {}

    def keep(self, names: Sequence[str]) -> None:
        """See to it that there are some on nodes of these names; the last ones are asked first."""
        for name, channel in tuple(self._channels.items()):
            if name not in names or channel.exit_code() is not None:
                self._channels.pop(name).kill()
        free = [name for name in reversed(names) if name not in self._channels]
        for name in free[: COUNT - len(self._channels)]:
            # Without one the run is as safe as its agents make it.
            with suppress(TransportError, OSError):
                self._channels[name] = self._transport(name).open(
                    self._command, on_line=lambda line: None, stderr=self._log, environment={}
                )
