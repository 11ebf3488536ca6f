"""Calls of SLURM's commands: limits, tries, what refuses a launch and what does not."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from llmtrain.backends.slurm import calls as calls_of_slurm
from llmtrain.backends.slurm import reach, refusals
from llmtrain.backends.slurm.backend import SlurmBackend
from llmtrain.backends.slurm.calls import SlurmCalls
from llmtrain.backends.slurm.refusals import (
    SlurmDiskAwayError,
    SlurmError,
    SlurmUnreachableError,
    refuse_unreadable,
)
from llmtrain.backends.slurm.states import LEAVING, JobRow
from llmtrain.config.load import load_profile
from llmtrain.transport.base import Completed, TransportError
from llmtrain.transport.local import LocalTransport
from tests.support.slurm_answers import Answers


def test_every_call_has_a_time_limit() -> None:
    calls = SlurmCalls(LocalTransport(), 0.5)
    began = time.monotonic()
    with pytest.raises(Exception, match="took longer than"):
        calls._run("sleep", "30")
    assert time.monotonic() - began < 5
    silent = SlurmCalls(Answers(None), 0.1)  # type: ignore[arg-type]
    assert silent.account(["1"]) == [] and silent.nodes("n1") == {}
    assert silent.hostnames("node[08-10],x") == ["node08", "node09", "node10", "x"]


class Refuses:
    """A transport whose commands fail with some words."""

    def __init__(self, said: str) -> None:
        self.said, self.asked = said, 0

    def run(self, argv: tuple[str, ...], *, timeout: float, stdin: bytes = b"") -> Completed:
        self.asked += 1
        return Completed(argv=argv, exit_code=1, stdout=b"", stderr=self.said.encode())


@pytest.mark.parametrize(
    ("said", "tries", "status"),
    [
        ("slurm_load_partitions: Unable to contact slurm controller (connect failure)", 3, 1),
        ("sinfo: fatal: Unable to process configuration file", 1, 2),
        ("sinfo: fatal: Could not establish a configuration source", 1, 1),
    ],
)
def test_only_a_controller_that_may_come_back_is_asked_again(
    said: str, tries: int, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reach, "PAUSE_SECONDS", 0.0)
    way = Refuses(said)
    with pytest.raises(SlurmError) as caught:
        reach.known_partitions(SlurmCalls(way, 5.0))  # type: ignore[arg-type]
    assert (way.asked, caught.value.exit_status) == (tries, status)
    assert caught.value.problems[0].may_pass == (status == 1)
    assert said.removeprefix("sinfo: ") in str(caught.value)
    assert [record.getMessage()[-18:] for record in caplog.records] == [
        f"try {number} of 3 follows" for number in range(2, tries + 1)
    ]


def test_sinfo_that_hangs_is_told_of_and_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reach, "SLOW_SECONDS", 0.05)
    calls = SlurmCalls(LocalTransport(), 0.3)
    calls.partitions = lambda: calls._run("sh", "-c", "echo waiting for godot >&2; sleep 9")  # type: ignore
    calls.controller_answers = lambda: False  # type: ignore[method-assign]
    with pytest.raises(SlurmError, match="s and was killed; it said: waiting for godot"):
        reach.known_partitions(calls)
    assert "sinfo" in caplog.text and "follows" not in caplog.text


class Cluster:
    """A transport to a cluster where sinfo does one thing and scontrol says another."""

    def __init__(self, sinfo: str, ping: str) -> None:
        self.sinfo, self.ping = sinfo, ping
        self.asked: list[tuple[str, ...]] = []

    def run(self, argv: tuple[str, ...], *, timeout: float, stdin: bytes = b"") -> Completed:
        self.asked.append(argv)
        if argv[0] == "sinfo":
            raise TransportError(self.sinfo)
        return Completed(argv=argv, exit_code="UP" not in self.ping, stdout=self.ping.encode(), stderr=b"")


SLOW = "`sinfo` took longer than 5 s and was killed"


@pytest.mark.parametrize(
    ("sinfo", "ping", "is_refused", "told"),
    [
        (
            SLOW,
            "Slurmctld(primary) at a is DOWN\nSlurmctld(backup) at b is UP\n",
            False,
            [f"{SLOW}; the part"],
        ),
        (f"login: {SLOW}", "Slurmctld(primary) at a is DOWN\n", True, []),
        ("`sinfo` cannot be started: No such file or directory", "", False, []),
        ("login: `sinfo` is not there", "", False, []),
        ("login: the connection is lost", "Slurmctld(primary) at a is UP\n", True, []),
    ],
)
def test_sinfo_alone_refuses_nothing(
    sinfo: str, ping: str, is_refused: bool, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    calls = SlurmCalls(Cluster(sinfo, ping), 5.0)  # type: ignore[arg-type]
    if is_refused:
        with pytest.raises(SlurmUnreachableError, match=sinfo):
            reach.known_partitions(calls)
    else:
        assert reach.known_partitions(calls) == []
    heard = [record.getMessage() for record in caplog.records]
    assert [text[: len(start)] for text, start in zip(heard, told, strict=True)] == told


def test_partitions_that_are_hidden_are_known_too() -> None:
    way = Cluster("`sinfo` is not there", "")
    assert SlurmCalls(way, 5.0).partitions() == []  # type: ignore[arg-type]
    assert "--all" in way.asked[0]


def test_a_configuration_that_cannot_be_read_is_told_at_once(tmp_path: Path) -> None:
    missing = str(tmp_path / "slurm.conf")
    with pytest.raises(SlurmError) as caught:
        SlurmCalls(LocalTransport(), 30.0, missing).queue(["1"])
    [problem] = caught.value.problems
    assert (problem.where, caught.value.exit_status) == ("SLURM_CONF", 2)
    assert missing in problem.message and "no such file" in problem.message
    os.mkfifo(missing)
    with pytest.raises(SlurmError, match="no regular file"):
        SlurmCalls(LocalTransport(), 30.0, missing).queue(["1"])


def test_a_configuration_on_a_disk_that_is_away_is_waited_for_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As seen on a mounted file system that nobody serves: `stat` sleeps until it is unmounted."""
    back = threading.Event()
    monkeypatch.setattr(refusals, "_open_once", lambda file: back.wait(60.0))
    with pytest.raises(SlurmDiskAwayError) as caught:
        refuse_unreadable(str(tmp_path / "slurm.conf"), seconds=0.1)
    back.set()
    [problem] = caught.value.problems
    assert (problem.where, caught.value.exit_status) == ("SLURM_CONF", 1)
    assert "has not answered for 0.1 s" in problem.message and str(tmp_path) in problem.hint

    def away(named: str) -> None:
        raise caught.value

    monkeypatch.setattr(calls_of_slurm, "refuse_unreadable", away)
    way = Refuses("")
    with pytest.raises(SlurmDiskAwayError):
        reach.known_partitions(SlurmCalls(way, 5.0, "slurm.conf"))  # type: ignore[arg-type]
    assert way.asked == 0, "commands that would hang too"


def test_only_the_first_call_that_a_person_waits_for_looks_at_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "slurm.conf"
    file.write_text("")
    calls = SlurmCalls(Answers(""), 5.0, str(file))  # type: ignore[arg-type]
    assert calls.queue(["1"]) == []
    file.unlink()
    assert calls.queue(["1"]) == []
    cluster, environment = load_profile("a100-32x8"), {"SLURM_CONF": str(file), "PATH": ""}
    assert SlurmBackend(cluster, environment=environment)._calls._configuration == str(file)
    supervisor = SlurmBackend(cluster, environment={**environment, "SLURM_JOB_ID": "7"})
    assert supervisor._calls._configuration == ""


def test_a_job_that_is_leaving_is_given_time() -> None:
    """Twice on its way out, then gone from the queue; one that stays is told as it is."""

    def leaving(row: JobRow) -> bool:
        return row.state == LEAVING

    rows = [JobRow(id="7", state=LEAVING), JobRow(id="7", state=LEAVING), None]
    calls = SlurmCalls(Answers(None), 0.1)  # type: ignore[arg-type]
    calls.queue = lambda jobs: [row] if (row := rows.pop(0)) else []  # type: ignore[method-assign]
    assert calls.settled(["7"], 30.0, leaving) is None and rows == []
    calls.queue = lambda jobs: [JobRow(id="7", state=LEAVING)]  # type: ignore[method-assign]
    assert calls.settled(["7"], 0.0, leaving) == JobRow(id="7", state=LEAVING)
