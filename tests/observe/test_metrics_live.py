"""Metrics beside a live run: offered by its supervisor, scraped by a real Prometheus, never in its way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from llmtrain.config.cluster import MetricsConfig
from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from llmtrain.supervise.metrics_process import metrics_command
from tests.support import launches
from tests.support import stand_in_runs as runs
from tests.support.prometheus import Prometheus, dashboard_queries, free_port

pytestmark = pytest.mark.e2e


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    run = RunDir(tmp_path / "live-0001")
    yield run
    runs.clean_up(run)
    for process in exporters(run):
        process.kill()


def exporters(run: RunDir) -> list[psutil.Process]:
    """Processes that offer the metrics of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if "--outlive" in process.cmdline() and str(run.path) in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def scrape(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def test_prometheus_sees_the_loss_of_a_live_run_and_fills_every_panel(run: RunDir, tmp_path: Path) -> None:
    port = free_port()
    overrides = (
        f"cluster.metrics.port={port}",
        *("parallel.dp=2", "parallel.tp=1", "parallel.pp=1"),
        *("train.steps=100000", "data.validation_every=5", "checkpoint.every_steps=20"),
    )
    launched = launches.launch(run, *overrides, home=tmp_path, options=("--detach",))
    launches.end(launched, 0)
    with Prometheus(tmp_path / "prometheus", f"127.0.0.1:{port}") as prometheus:
        prometheus.wait('llmtrain_loss{run="live-0001"} > 0', seconds=180)
        assert prometheus.value('llmtrain_run_state{run="live-0001", state="running"}') == 1
        told = {event.payload.loss for event in runs.events(run, "step_finished")}
        assert prometheus.value("llmtrain_loss") in told
        asked = [query.replace("$run", "live.*") for query in dashboard_queries()]
        for query in asked:
            prometheus.wait(query, seconds=120)
        assert prometheus.query('ALERTS{alertname=~"Llmtrain.*", alertstate="firing"}') == []
    launches.end(launches.start(tmp_path, "stop", str(run.path), home=tmp_path), 0)
    runs.wait_for(lambda: read_record(run).exit_status == 75, 120)
    assert 'llmtrain_run_state{run="live-0001",state="stopped"} 1.0' in scrape(port), "the last state"
    runs.assert_nothing_left(run)


@pytest.fixture
def stand_in(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunDir]]:
    made: list[RunDir] = []

    def make(*overrides: str, **behaviour: object) -> RunDir:
        run = runs.make_run(tmp_path / f"run-{len(made)}", overrides=overrides, **behaviour)
        runs.use_corpus(run, runs.prepared_corpus(tmp_path_factory.mktemp("corpus")))
        made.append(run)
        return run

    yield make
    for run in made:
        runs.clean_up(run)
        for process in exporters(run):
            process.kill()


def notices(run: RunDir) -> list[str]:
    return [event.payload.message for event in runs.events(run, "notice")]


def test_a_port_in_use_is_told_and_tried_again_and_the_run_goes_on(stand_in) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = stand_in(f"cluster.metrics.port={port}", steps=300)
        supervisor = runs.supervise(run)
        runs.wait_for(lambda: any("cannot listen on" in text for text in notices(run)), 60)
    runs.wait_for(lambda: "llmtrain_step" in scrape(port), 60, "metrics once the port is free")
    os.kill(supervisor.pid, signal.SIGTERM)
    assert supervisor.wait(60) == 75
    assert [text for text in notices(run) if "metrics" in text] == [
        f"metrics are not offered, which is tried again: --listen: cannot listen on 127.0.0.1:{port}: "
        "Address already in use"
    ]


def test_a_killed_exporter_comes_back(stand_in, tmp_path: Path) -> None:
    file = tmp_path / "node" / "llmtrain.prom"
    run = stand_in(f"cluster.metrics.text_file={file}", steps=300)
    supervisor = runs.supervise(run)
    [first] = runs.wait_for(lambda: exporters(run), 60)
    runs.wait_for(lambda: file.exists() and "llmtrain_step{" in file.read_text(), 60)
    assert first.nice() > 0, "it only takes time that nobody else wants"
    first.kill()
    runs.wait_for(lambda: [each for each in exporters(run) if each.pid != first.pid], 60)
    os.kill(supervisor.pid, signal.SIGTERM)
    assert supervisor.wait(60) == 75


def test_the_last_thing_told_is_that_the_supervisor_is_gone(stand_in, tmp_path: Path) -> None:
    """What the supervisor starts, with a shorter time after its end."""
    file = tmp_path / "node" / "llmtrain.prom"
    run = stand_in(steps=300)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 1), 60)
    command = metrics_command(run, MetricsConfig(text_file=str(file)))
    command[command.index("--outlive") + 1] = "1"
    exporter = subprocess.Popen(command, stdin=subprocess.PIPE)
    runs.wait_for(lambda: file.exists() and 'state="running"} 1.0' in file.read_text(), 60)
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait(30)
    exporter.stdin.close()
    assert exporter.wait(60) == 0
    assert 'state="interrupted"} 1.0' in file.read_text()
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_what_is_started() -> None:
    run = RunDir(Path("/runs/a"))
    assert metrics_command(run, MetricsConfig()) == []
    both = metrics_command(run, MetricsConfig(port=1, address="::1", text_file="/x/a.prom"))
    assert both[1:] == [
        *("-m", "llmtrain", "metrics", "/runs/a", "--listen", "[::1]:1"),
        *("--text-file", "/x/a.prom", "--outlive", "45.0"),
    ]
