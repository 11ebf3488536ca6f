"""SLURM's words in ours: the table of states, tolerant columns, exit codes, refusals."""

from __future__ import annotations

import pytest

from llmtrain.backends.base import JobState
from llmtrain.backends.slurm.calls import _node_row, leaf_switches
from llmtrain.backends.slurm.refusals import (
    REFUSALS,
    SlurmError,
    SlurmUnreachableError,
    refusal,
    what_it_said,
)
from llmtrain.backends.slurm.states import (
    STATES,
    JobRow,
    account_rows,
    exit_code_of,
    one_of,
    queue_rows,
    state_of,
)
from llmtrain.errors import ConfigError, ExitStatus


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("PENDING", JobState.PENDING),
        ("CONFIGURING", JobState.PENDING),
        ("RUNNING", JobState.RUNNING),
        ("COMPLETING", JobState.RUNNING),
        ("COMPLETED", JobState.SUCCEEDED),
        ("FAILED", JobState.FAILED),
        ("CANCELLED", JobState.CANCELLED),
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("PREEMPTED", JobState.PREEMPTED),
        ("TIMEOUT", JobState.TIMED_OUT),
        ("DEADLINE", JobState.TIMED_OUT),
        ("NODE_FAIL", JobState.NODE_FAILED),
        ("BOOT_FAIL", JobState.NODE_FAILED),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("OUT_OF_ME+", JobState.OUT_OF_MEMORY),
        ("RUNNING,POWERING_UP", JobState.RUNNING),
        ("completed", JobState.SUCCEEDED),
        ("SOMETHING_NEW", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_states(word: str, ours: JobState) -> None:
    assert state_of(word) == ours


def test_bad_ends_stay_apart() -> None:
    words = ("PREEMPTED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "CANCELLED", "FAILED")
    assert len({STATES[word] for word in words}) == len(words)


QUEUE = """\
JOBID|ARRAY_JOB_ID|ARRAY_TASK_ID|STATE|REASON|START_TIME|RESTART_COUNT|EXIT_CODE|NODELIST|
7|7|N/A|RUNNING|None|2026-11-30T13:44:38|2|0|node[1-3]|
9|8|3|PENDING|JobArrayTaskLimit|N/A|0|0||
"""


def test_queue_is_read_by_column_names() -> None:
    running, waiting = queue_rows(QUEUE)
    assert (running.id, running.state, running.restarts, running.nodes) == ("7", "RUNNING", 2, "node[1-3]")
    assert running.reason == "" and running.start is not None
    assert (waiting.id, waiting.ours, waiting.reason) == ("8_3", JobState.PENDING, "JobArrayTaskLimit")
    assert waiting.start is None and waiting.nodes == "" and waiting.number == "9"


def test_columns_may_move_vanish_and_be_new() -> None:
    moved = "NEW|STATE|JOBID|\nx|TIMEOUT|12|\n"
    [row] = queue_rows(moved)
    assert row == JobRow(id="12", state="TIMEOUT", number="12")
    assert queue_rows("") == [] == queue_rows("JOBID|STATE|\n")
    assert queue_rows("slurm_load_jobs error: Unexpected message received\n") == []


def test_accounting_is_read_by_column_names() -> None:
    text = (
        "JobID|State|ExitCode|Reason|Start|NodeList\n"
        "12|CANCELLED by 0|0:15|None|2026-11-30T13:44:38|node1\n13|FAILED|75:0||Unknown|\n"
    )
    killed, left = account_rows(text)
    assert (killed.ours, killed.exit_code, killed.nodes) == (JobState.CANCELLED, -15, "node1")
    assert (left.ours, left.exit_code, left.start) == (JobState.FAILED, 75, None)


@pytest.mark.parametrize(
    ("text", "code"),
    [("0:0", 0), ("75:0", 75), ("0:9", -9), ("19200", 75), ("9", -9), ("256", 1), ("", None), ("x:y", None)],
)
def test_exit_codes(text: str, code: int | None) -> None:
    assert exit_code_of(text) == code


def test_the_job_that_speaks_for_a_chain() -> None:
    ended, running = JobRow(id="1", state="FAILED", start=1.0), JobRow(id="2", state="RUNNING", start=2.0)
    waiting, later = JobRow(id="3", state="PENDING"), JobRow(id="4", state="COMPLETED", start=4.0)
    assert one_of([ended, running, waiting]) == running
    assert one_of([ended, waiting]) == waiting
    assert one_of([later, ended]) == later
    assert one_of([]) is None


def test_status_of_a_job_that_waits_and_of_one_that_ended() -> None:
    waiting = JobRow(id="1", state="PENDING", reason="Resources", start=5.0, exit_code=0).status()
    assert (waiting.state, waiting.reason, waiting.expected_start, waiting.exit_code) == (
        JobState.PENDING, "Resources", 5.0, None,
    )  # fmt: skip
    ended = JobRow(id="1", state="OUT_OF_MEMORY", start=5.0, exit_code=-9).status()
    assert (ended.state, ended.raw, ended.expected_start, ended.exit_code) == (
        JobState.OUT_OF_MEMORY, "OUT_OF_MEMORY", None, -9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("state", "well"),
    [
        ("IDLE", True), ("MIXED", True), ("ALLOCATED+DRAIN", True), ("DOWN", False), ("DOWN*", False),
        ("MIXED*", False), ("IDLE+NOT_RESPONDING", False), ("ALLOCATED+FAIL", False),
        ("IDLE+POWERED_DOWN", False),
    ],
)  # fmt: skip
def test_node_states(state: str, well: bool) -> None:
    row = _node_row(
        f"NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=n1 State={state} ThreadsPerCore=1"
    )
    assert row is not None
    assert (row.name, row.address, row.is_well) == ("n1", "10.0.0.1", well)


FAILED = "sbatch: error: Batch job submission failed: "
REFUSED = [
    ("sbatch: error: invalid partition specified: foo", "backend.slurm.partition"),
    (f"{FAILED}Invalid account or account/partition combination specified",
     "backend.slurm.account"),
    (f"{FAILED}Invalid qos specification", "backend.slurm.qos"),
    (f"{FAILED}Requested reservation is invalid", "backend.slurm.reservation"),
    ("sbatch: error: Invalid --time specification", "backend.slurm.time"),
    (f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)",
     "backend.slurm.time"),
    (f"{FAILED}Invalid node name specified", "backend.slurm.nodelist"),
    (f"{FAILED}Invalid feature specification", "backend.slurm.constraint"),
    ("sbatch: error: Memory specification can not be satisfied", "backend.slurm.mem"),
    (f"{FAILED}Invalid generic resource (gres) specification",
     "backend.slurm.gres"),
    (f"{FAILED}Node count specification invalid", "nodes"),
    (f"sbatch: error: CPU count per node can not be satisfied\n{FAILED}"
     "Requested node configuration is not available", "nodes"),
    (f"{FAILED}Invalid wckey specification", "backend.slurm.wckey"),
    ("sbatch: error: Invalid --mail-type specification", "backend.slurm.mail_type"),
    (f"{FAILED}Job dependency problem", "backend.slurm.dependency"),
    (f"{FAILED}Invalid job array specification", "backend.slurm.chain_length"),
    ("sbatch: unrecognized option '--bogus=1'\nTry \"sbatch --help\" for more information",
     "backend.slurm.extra"),
    (f"{FAILED}User's group not permitted to use this partition",
     "backend.slurm.account"),
    (f"{FAILED}Required partition not available (inactive or drain)",
     "backend.slurm.partition"),
]  # fmt: skip


@pytest.mark.parametrize(("stderr", "where"), REFUSED)
def test_refusals_name_the_field(stderr: str, where: str) -> None:
    error = refusal("sbatch", stderr)
    assert isinstance(error, ConfigError) and error.exit_status == ExitStatus.USAGE
    [problem] = error.problems
    assert problem.where == where
    assert problem.hint
    assert "sbatch: error" not in problem.message and "Try " not in problem.message


@pytest.mark.parametrize(
    "stderr",
    [
        f"{FAILED}Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
        "sbatch: error: QOSMaxSubmitJobPerUserLimit",
        f"{FAILED}I/O error writing script/environment to file: No space left on device",
    ],
)
def test_passing_refusals_blame_no_field(stderr: str) -> None:
    error = refusal("sbatch", stderr)
    assert isinstance(error, SlurmError) and error.exit_status == ExitStatus.FAILED
    assert error.problems[0].hint and not error.problems[0].where


@pytest.mark.parametrize(
    "stderr",
    [
        f"{FAILED}Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "sbatch: error: fetch_config: DNS SRV lookup failed\n"
        "sbatch: error: could not establish a configuration",
    ],
)
def test_an_absent_controller_is_no_refusal(stderr: str) -> None:
    error = refusal("sbatch", stderr)
    assert isinstance(error, SlurmUnreachableError)
    assert error.problems[0].may_pass, "a controller that is started again tells nobody of the cluster"
    assert "scontrol ping" in error.problems[0].hint


def test_leaf_switches_of_a_real_cluster() -> None:
    text = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=node3,node[07-08]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=node[1-4] Switches=leaf[1-2]
"""
    assert leaf_switches(text) == {"leaf1": ("node1", "node2"), "leaf2": ("node3", "node07", "node08")}
    assert leaf_switches("") == leaf_switches("nothing of the kind\nLevel=0") == {}


def test_unknown_words_are_passed_on() -> None:
    error = refusal("sbatch", "sbatch: error: The moon is full\n")
    assert str(error) == "sbatch failed: The moon is full"
    assert what_it_said("") == "it said nothing"


def test_every_refusal_is_met_by_a_case() -> None:
    met = {entry.where for entry in REFUSALS if entry.where}
    assert met == {where for _, where in REFUSED}
