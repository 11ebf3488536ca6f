"""The lease: one holder, taken over when dead, fenced when lost; and the identity of processes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from llmtrain.errors import UsageError
from llmtrain.run import lease as lease_module
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import LeaseLostError, acquire, read_holder
from llmtrain.run.processes import ProcessIdentity, this_process


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def write_holder(run: RunDir, token: int, process: ProcessIdentity, *, age: float = 0.0) -> None:
    """A holder that some other process wrote so many seconds ago."""
    from dataclasses import asdict

    run.lease.mkdir(parents=True, exist_ok=True)
    path = run.lease / f"{token:08d}.json"
    path.write_text(json.dumps({"schema": 1, "process": asdict(process), "since": 0.0, "released": False}))
    stamp = path.stat().st_mtime - age
    os.utime(path, (stamp, stamp))


def dead_process() -> ProcessIdentity:
    """The identity of a process that has ended and was reaped."""
    code = "from llmtrain.run.processes import this_process as t; p = t(); print(p.pid, p.start)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid, start = done.stdout.split()
    me = this_process()
    return ProcessIdentity(host=me.host, boot=me.boot, pid=int(pid), start=int(start))


def test_first_holder_gets_token_1_and_a_second_is_refused(run: RunDir) -> None:
    lease = acquire(run)
    assert lease.token == 1
    with pytest.raises(UsageError) as error:
        acquire(run)
    assert f"already supervised by pid {os.getpid()} on host" in error.value.text()
    assert "llmtrain stop" in error.value.text()
    lease.check()


def test_what_to_type_is_quoted_for_a_shell(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a b's $x")
    run.path.mkdir()
    lease = acquire(run)
    with pytest.raises(UsageError) as error:
        acquire(run)
    typed = error.value.text().partition("llmtrain stop ")[2].partition("`")[0]
    assert shlex.split(typed) == [str(run.path)]
    lease.release()


def test_released_lease_is_free_and_the_token_rises(run: RunDir) -> None:
    acquire(run).release()
    holder = read_holder(run)
    assert holder is not None and holder.released and not holder.is_alive
    assert acquire(run).token == 2


def test_dead_holder_is_taken_over(run: RunDir) -> None:
    write_holder(run, 3, dead_process())
    assert acquire(run).token == 4


def test_same_pid_with_another_start_time_is_another_process(run: RunDir) -> None:
    me = this_process()
    write_holder(run, 1, ProcessIdentity(host=me.host, boot=me.boot, pid=me.pid, start=me.start + 1))
    assert acquire(run).token == 2


def test_zombie_counts_as_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    me, start = this_process(), 0
    identity = ProcessIdentity(host=me.host, boot=me.boot, pid=child.pid, start=start)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.is_alive()
    child.wait()


@pytest.mark.parametrize(("age", "alive"), [(0.0, True), (59.0, True), (61.0, False)])
@pytest.mark.parametrize("elsewhere", ["host", "boot"])
def test_holder_elsewhere_is_judged_by_age(run: RunDir, age: float, alive: bool, elsewhere: str) -> None:
    me = this_process()
    host = "another-machine" if elsewhere == "host" else me.host
    boot = "another-boot" if elsewhere == "boot" else me.boot
    write_holder(run, 1, ProcessIdentity(host=host, boot=boot, pid=1, start=1), age=age)
    holder = read_holder(run)
    assert holder is not None and holder.is_alive is alive


def test_loser_of_a_takeover_is_fenced(run: RunDir) -> None:
    old = acquire(run)
    me = this_process()
    write_holder(run, 2, me)
    for write in (old.check, old.renew):
        with pytest.raises(LeaseLostError, match="taken over"):
            write()
    old.release()
    holder = read_holder(run)
    assert holder is not None and holder.token == 2 and not holder.released


def test_renew_touches_the_file_when_due(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = acquire(run)
    os.utime(lease.path, (1.0, 1.0))
    lease.renew()
    assert lease.path.stat().st_mtime == 1.0
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.0)
    lease.renew()
    assert lease.path.stat().st_mtime > 1.0


def test_of_many_candidates_exactly_one_wins(run: RunDir) -> None:
    write_holder(run, 1, dead_process())
    results: list[int] = []
    barrier = threading.Barrier(16)

    def compete() -> None:
        barrier.wait()
        with suppress(UsageError):
            results.append(acquire(run).token)

    threads = [threading.Thread(target=compete) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [2]
