"""Runs over real SSH nodes with stand-ins for ranks: to the end, and through every kind of loss."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmtrain.agent.sweep import leftovers
from llmtrain.run.layout import RunDir
from llmtrain.run.node_history import recall
from llmtrain.run.record import read_record
from tests.support import ssh_runs
from tests.support import stand_in_runs as runs
from tests.support.beds import SshBed

pytestmark = pytest.mark.e2e

LOST_SECONDS = 12.0
"""From a silent loss to its finding: 8 s for the end of the channel, or 10 s of silence."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.prepared_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def make(bed_home: Path, ssh_bed: SshBed, tmp_path: Path, corpus: Path) -> Iterator[Callable[..., RunDir]]:
    made: list[RunDir] = []

    def make_one(*, nodes: int = 4, spares: int = 0, **options: object) -> RunDir:
        profile = ssh_runs.write_profile(tmp_path / "bed.yaml", ssh_bed, nodes=nodes, spares=spares)
        made.append(ssh_runs.make_run(tmp_path / "runs" / f"run-{len(made)}", profile, **options))
        runs.use_corpus(made[-1], corpus)
        return made[-1]

    yield make_one
    ssh_bed.restore()
    for run in made:
        runs.clean_up(run)


def finish(run: RunDir, supervisor: subprocess.Popen[bytes], status: int, seconds: float = 120.0) -> None:
    assert supervisor.wait(seconds) == status, run.supervisor_log.read_text()
    record = read_record(run)
    assert (record.stage, record.exit_status) == ("ended", status)


def outcomes(run: RunDir) -> list[tuple[str, str]]:
    return [(attempt.outcome, attempt.cause) for attempt in read_record(run).attempts]


def test_ranks_are_told_the_interface_of_their_node(make) -> None:
    run = make(steps=2)
    script = run.scripts / "node.sh"
    body = script.read_text().partition("\n")
    line = (
        f'\nenv | grep SOCKET_IFNAME | sort > {run.path}/ifname-"$2"\necho "$5" > {run.path}/address-"$2"\n'
    )
    script.write_text(body[0] + line + body[2])
    finish(run, runs.supervise(run), 0)
    for node in range(4):
        assert "GLOO_SOCKET_IFNAME=eth0\n" in (run.path / f"ifname-{node}").read_text()


def test_restart_over_all_nodes_uses_the_ranks_in_standby(make) -> None:
    run = make(steps=60, step_seconds=0.3, overrides=("faults.standby_after=0s",))
    supervisor = runs.supervise(run)
    logs = [run.attempt(1).standby_log(node) for node in range(4)]
    runs.wait_for(lambda: all(log.exists() for log in logs), what="node scripts in standby")
    time.sleep(2.0)  # so that their ranks wait, and not only start
    (run.path / "die-1-3").touch()
    finish(run, supervisor, 0)
    assert outcomes(run) == [("failed", "rank_dead"), ("completed", "")]
    assert any("in standby go on" in event.payload.message for event in runs.events(run, "notice"))
    assert all(run.attempt(2).node_log(node).exists() for node in range(4))
    assert not leftovers(run.path)


def test_killed_supervisor_leaves_nothing_on_any_node_and_a_new_one_goes_on(make) -> None:
    run = make(steps=10, step_seconds=0.4)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 3), what="step 3")
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    runs.wait_for(lambda: not leftovers(run.path), 30.0, "the ranks to save and leave")
    reasons = {event.payload.reason for event in runs.events(run, "rank_finished")}
    assert reasons == {"stopped"}
    finish(run, runs.supervise(run), 0)
    assert outcomes(run) == [("abandoned", ""), ("completed", "")]
    runs.assert_nothing_left(run)


@pytest.mark.parametrize("fault", ["crash", "power", "cut", "freeze"])
def test_lost_node_is_replaced_by_the_spare(make, ssh_bed, fault) -> None:
    run = make(nodes=5, spares=1, steps=12, step_seconds=0.4)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 3), what="step 3")
    began = time.time()
    ssh_bed.fault(fault, "node2")
    finish(run, supervisor, 0)
    found = runs.events(run, "found")[0]
    assert found.payload.node == 1, found.payload.message
    assert "node2" in found.payload.message
    assert found.time - began < (2.0 if fault == "crash" else LOST_SECONDS)
    record = read_record(run)
    assert record.lost_nodes == ("node2",)
    assert record.attempts[0].nodes == ("node1", "node2", "node3", "node4")
    assert {attempt.nodes for attempt in record.attempts[1:]} == {("node1", "node3", "node4", "node5")}
    assert record.reached_step == 12
    ssh_bed.restore()
    # A node that was only cut off still runs its agent, which leaves by itself when nobody speaks to it.
    runs.assert_nothing_left(run, seconds=90.0)


def test_what_a_lost_node_still_runs_is_ended_with_the_run_when_it_is_back(make, ssh_bed) -> None:
    """By itself its agent would leave after a minute, and its ranks within two more."""
    hang = {"rank": 2, "step": 4}
    run = make(nodes=5, spares=1, steps=80, step_seconds=0.3, ignore_term=True, hang=hang)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 3), what="step 3")
    ssh_bed.fault("cut", "node2")
    runs.wait_for(lambda: runs.step_reached(run, 1, attempt=2), what="a step of the next attempt")
    ssh_bed.restore()
    finish(run, supervisor, 0)
    told = [event.payload.message for event in runs.events(run, "notice")]
    assert any(text.startswith("node2: ") and "killed leftovers" in text for text in told), told
    runs.assert_nothing_left(run)


def test_lost_node_without_a_spare_ends_the_run(make, ssh_bed) -> None:
    run = make(steps=40, step_seconds=0.4)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 2), what="step 2")
    ssh_bed.fault("crash", "node4")
    finish(run, supervisor, 93)
    assert "1 of 4 nodes lost (node4), the budget allows 0" in read_record(run).message
    ssh_bed.restore()
    runs.assert_nothing_left(run)


def test_node_that_has_become_unfit_is_left_out_before_the_next_attempt(make, ssh_bed) -> None:
    run = make(nodes=5, spares=1, steps=12, step_seconds=0.4)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 3), what="step 3")
    folder = str(run.path.parent)
    ssh_bed.run("node2", "mount", "-t", "tmpfs", "tmpfs", folder)
    try:
        ssh_bed.run("node3", "kill", "-9", str(runs.rank_pid(run, 5)))
        finish(run, supervisor, 0)
    finally:
        ssh_bed.run("node2", "umount", "-l", folder)
    record = read_record(run)
    assert [attempt.nodes for attempt in record.attempts] == [
        ("node1", "node2", "node3", "node4"),
        ("node1", "node3", "node4", "node5"),
    ]
    [loss] = record.losses
    assert loss.node == "node2" and "is not the same folder there as here" in loss.why
    [verdict] = recall(run.path.parent)
    assert (verdict.node, verdict.verdict, verdict.by) == ("node2", "lost", run.run_id)
    runs.assert_nothing_left(run)


@contextmanager
def firewall(bed: SshBed, at: str, against: str) -> Iterator[None]:
    """Node `at` refuses connections of node `against`, but for SSH."""
    source = ["-s", bed.address(against), "-p", "tcp", "--dport", "1024:65535", "--syn"]
    rule = ["INPUT", *source, "-j", "REJECT"]
    bed.run(at, "iptables", "-A", *rule)
    try:
        yield
    finally:
        bed.run(at, "iptables", "-D", *rule)


def test_pair_of_nodes_that_do_not_reach_each_other_is_named(make, ssh_bed) -> None:
    run = make(steps=4)
    with firewall(ssh_bed, "node1", "node3"):
        finish(run, runs.supervise(run), 93)
    found = runs.events(run, "found")[0].payload
    assert found.finding == "peer_unreachable"
    assert found.message.startswith(f"node3 does not reach node1 at {ssh_bed.address('node1')} port ")
    assert "connection refused" in found.message
    assert "node2" not in found.message and "node4" not in found.message
    assert not runs.events(run, "rank_started")
    runs.assert_nothing_left(run)


def test_pair_without_the_first_node_is_found_before_ranks_start_and_costs_one_node(make, ssh_bed) -> None:
    run = make(nodes=5, spares=1, steps=2)
    with firewall(ssh_bed, "node2", "node3"):
        finish(run, runs.supervise(run), 0)
    [found] = [event.payload for event in runs.events(run, "found")]
    assert found.finding == "peer_unreachable"
    assert found.message.startswith(f"node3 does not reach node2 at {ssh_bed.address('node2')} port ")
    assert found.message.count("does not reach") == 1
    record = read_record(run)
    assert [attempt.nodes for attempt in record.attempts] == [
        ("node1", "node2", "node3", "node4"),
        ("node1", "node2", "node4", "node5"),
    ]
    assert {event.attempt for event in runs.events(run, "rank_started")} == {2}
    runs.assert_nothing_left(run)


def command(*words: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


def test_resume_without_a_node_says_which_one_and_works_once_it_is_back(make, ssh_bed) -> None:
    from llmtrain.supervise.stop import ask_to_stop

    run = make(steps=8, step_seconds=0.4, no_checkpoints=True)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 2), what="step 2")
    ask_to_stop(run)
    finish(run, supervisor, 75)
    ssh_bed.fault("cut", "node3")
    status, text = command("resume", run.path)
    assert status == 1
    assert f"node3: no answer from {ssh_bed.address('node3')} port 22 within 3 s" in text
    assert "3 of 4 nodes are fit to start, 4 are needed" in text
    # Whoever starts the supervisor past that check gets the same, in the record.
    finish(run, runs.supervise(run), 1)
    assert "3 of 4 nodes are fit to start, 4 are needed" in read_record(run).message
    ssh_bed.restore()
    finish(run, runs.supervise(run), 0)
    runs.assert_nothing_left(run)
