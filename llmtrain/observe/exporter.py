"""Prometheus metrics of live runs over HTTP, or as a text file for node_exporter's textfile collector."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from llmtrain.errors import RunError, UsageError
from llmtrain.observe.metrics import families
from llmtrain.observe.run_reader import RunReader, RunView
from llmtrain.run.atomic import write_atomic
from llmtrain.run.layout import RunDir

FORGET_SECONDS = 3600.0
"""A run that has ended is exported for so long after its last event."""


class Exporter(Collector):
    """Follows all runs that `list_runs` names; a collection reads what was appended since the last one."""

    def __init__(
        self, list_runs: Callable[[], Sequence[RunDir]], *, forget_seconds: float = FORGET_SECONDS
    ) -> None:
        self._list_runs, self._forget = list_runs, forget_seconds
        self._readers: dict[Path, RunReader] = {}
        self._over: set[Path] = set()
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Families of all runs that are worth exporting; a run that cannot be read is left out."""
        with self._lock:
            found = list(families(self._views()))
        yield from found

    def describe(self) -> list[Metric]:
        """No family: which ones there are depends on what the runs have told so far."""
        return []

    def _views(self) -> Iterator[RunView]:
        now = time.time()
        for run in self._list_runs():
            if run.path in self._over:
                continue
            try:
                reader = self._readers.get(run.path) or RunReader(run)
                reader.advance()
                view = reader.view(now)
            except (RunError, OSError):
                continue
            if view.state.ended and now - view.state.ended.time > self._forget:
                # From here on it is not looked at; a run that is resumed later needs a new exporter.
                self._readers.pop(run.path, None)
                self._over.add(run.path)
                continue
            self._readers[run.path] = reader
            yield view


def exposition(exporter: Exporter) -> bytes:
    """The metrics in Prometheus' text format."""
    return generate_latest(_registry(exporter))


def write_text_file(exporter: Exporter, path: Path) -> None:
    """Replace a text file for node_exporter in one step; raises OSError."""
    write_atomic(path, exposition(exporter))


def serve(exporter: Exporter, address: str, port: int) -> tuple[str, Callable[[], None]]:
    """Answer scrapes on a thread of its own; returns the URL and a function that ends it.

    Port 0 takes a free one. Raises UsageError when the address cannot be used.
    """
    try:
        server, thread = start_http_server(port, addr=address, registry=_registry(exporter))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {address}:{port}: {error.strerror or error}",
            where="--listen",
            hint="choose another port, or 0 for a free one",
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return f"http://{address}:{server.server_port}/metrics", stop


def _registry(exporter: Exporter) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(exporter)
    return registry
