"""A real Prometheus of this machine, and what the shipped dashboard and rules ask it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from llmtrain.resources import shipped_folder
from tests.support.beds import unavailable

TEMPLATES = shipped_folder("templates")
RULES = TEMPLATES / "prometheus-rules.yaml"
DASHBOARD = TEMPLATES / "grafana-dashboard.json"


def tool(name: str) -> str:
    """Path of a tool of Prometheus; skips the test, or fails it where everything must run."""
    found = shutil.which(name)
    if found is None:
        unavailable(f"needs {name}: apt-get install prometheus")
    return found


def dashboard_queries() -> list[str]:
    """Every query of the shipped dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Prometheus:
    """A Prometheus of this machine that scrapes one target (`HOST:PORT`) every second."""

    def __init__(self, folder: Path, target: str) -> None:
        self.folder, self.command = folder, tool("prometheus")
        folder.mkdir()
        shutil.copy(RULES, folder)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [RULES.name],
            "scrape_configs": [{"job_name": "llmtrain", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self.address = f"127.0.0.1:{free_port()}"

    def __enter__(self):
        self.log = (self.folder / "log").open("w")
        self.process = subprocess.Popen(
            [
                self.command,
                f"--config.file={self.folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self.folder / 'data'}",
                f"--web.listen-address={self.address}",
            ],
            stdout=self.log,
            stderr=self.log,
        )
        return self

    def __exit__(self, *_) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def query(self, expression: str) -> list[dict]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://{self.address}/api/v1/query?{query}", timeout=10) as answer:
            return json.load(answer)["data"]["result"]

    def value(self, expression: str) -> float:
        [found] = self.query(expression)
        return float(found["value"][1])

    def wait(self, expression: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if self.query(expression):
                    return
            except OSError:
                assert self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.2)
        pytest.fail(f"no data for {expression} after {seconds} s")
