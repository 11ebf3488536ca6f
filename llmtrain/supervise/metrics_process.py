"""The process beside a supervisor that offers the run's metrics to Prometheus, where the profile asks for it.

It only reads the run's folder, so nothing that happens to it touches the training. It notices the end of its
supervisor, however that came, by the end of its standard input, and leaves by itself once the last state
could be scraped.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from llmtrain.config.cluster import MetricsConfig
from llmtrain.run.layout import RunDir

DELAYS = (1.0, 5.0, 30.0, 60.0, 300.0)
"""Seconds before each restart of a process that left; after the last one it is given up."""
OUTLIVE_SECONDS = 45.0
"""How long the last state is offered after a supervisor's end: three scrapes of a usual Prometheus."""
SETTLED_SECONDS = 600.0
"""A process that lived so long has all its restarts again."""


class MetricsProcess:
    """Starts the process and keeps it; `tell` gets a sentence for a person when that fails."""

    def __init__(
        self,
        run: RunDir,
        metrics: MetricsConfig,
        tell: Callable[[str], None],
        *,
        delays: Sequence[float] = DELAYS,
    ) -> None:
        self._run, self._tell, self._delays = run, tell, delays
        self._command = metrics_command(run, metrics)
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="metrics-process", daemon=True)

    def __enter__(self) -> MetricsProcess:
        if self._command:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        process = self._process
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()

    def _keep(self) -> None:
        failures = 0
        while not self._over.is_set():
            begun = time.monotonic()
            try:
                self._run_once()
            except OSError as error:
                self._tell(f"metrics are not offered: {error}")
                return
            if self._over.is_set():
                return
            failures = 1 if time.monotonic() - begun > SETTLED_SECONDS else failures + 1
            if failures > len(self._delays):
                self._tell(f"metrics are not offered any more: {self._last_line()}")
                return
            if failures == 1:
                self._tell(f"metrics are not offered, which is tried again: {self._last_line()}")
            self._over.wait(self._delays[failures - 1])

    def _run_once(self) -> None:
        """Start the process and wait for its end."""
        with self._run.metrics_log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        self._process.wait()

    def _last_line(self) -> str:
        try:
            text = self._run.metrics_log.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            text = ""
        told = next((line for line in text.splitlines() if line.startswith("error: ")), "")
        return told.removeprefix("error: ") or f"see {self._run.metrics_log}"


def metrics_command(run: RunDir, metrics: MetricsConfig) -> list[str]:
    """What is started; empty when nothing is asked for."""
    options: list[str] = []
    if metrics.port is not None:
        host = f"[{metrics.address}]" if ":" in metrics.address else metrics.address
        options += ["--listen", f"{host}:{metrics.port}"]
    if metrics.text_file:
        options += ["--text-file", metrics.text_file]
    if not options:
        return []
    options += ["--outlive", str(OUTLIVE_SECONDS)]
    return [sys.executable, "-m", "llmtrain", "metrics", str(run.path), *options]
