"""What keeps a launch from starting: at least 60 causes, each told with its fix and the right exit code.

Wrong values of a profile are transcripts (`tests/cli/bad_input/backends.txt`, exit code 2), wrong keys and
silent hosts are tried on real nodes (`tests/ssh/test_login.py`, `test_backend.py`). Here: what nodes say of
themselves (1), and what SLURM answers (2 when a field is to blame, else 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.backends.preflight import Expected, Health, PreflightError, Report, problems_of
from llmtrain.backends.slurm.refusals import refusal
from llmtrain.backends.slurm.states import HOPELESS_REASONS
from llmtrain.errors import LlmtrainError
from llmtrain.probe.facts import Disk, Gpu, Gpus, Machine, Xid
from llmtrain.transport.base import TransportError
from llmtrain.transport.srun import step_hint
from tests.slurm.test_states import REFUSED
from tests.support import node_reports
from tests.support.transcripts import read_cases

GB = 10**9
MACHINE = Machine(
    host="a",
    system="Linux",
    python="3.11.7",
    torch="2.13.0",
    nccl="2.28.9",
    cuda="13.0",
    cores=8,
    load=0.1,
    memory_total=64 * GB,
    memory_available=60 * GB,
    shared_memory=None,
    open_files=65536,
    locked_memory=-1,
    host_resolves="10.0.0.1",
    gpus=Gpus(driver="580", gpus=(Gpu(index=0, name="H100", uuid="u", memory_total=80 * GB, memory_used=0),)),
)
DISK = Disk(path="/shared/runs", total=1000 * GB, free=900 * GB, inodes_total=10**6, inodes_free=10**6)
GOOD = replace(node_reports.GOOD, health=Health(machine=MACHINE, disk=DISK))
EXPECTED = Expected(llmtrain="1.0", folder="/shared/runs", nonce="n", gpus=1)


def machine(**changes: object) -> dict[str, object]:
    return {"health": Health(machine=replace(MACHINE, **changes), disk=DISK)}  # type: ignore[arg-type]


def gpu(**changes: object) -> dict[str, object]:
    one = replace(MACHINE.gpus.gpus[0], **changes)  # type: ignore[arg-type]
    return machine(gpus=Gpus(driver="580", gpus=(one,)))


def disk(**changes: int) -> dict[str, object]:
    return {"health": Health(machine=MACHINE, disk=replace(DISK, **changes))}


NODES: Mapping[str, tuple[dict[str, object], str, str]] = {
    "no llmtrain": ({"llmtrain": "ModuleNotFoundError: x"}, "has no llmtrain", "pip install llmtrain==1.0"),
    "other llmtrain": ({"llmtrain": "0.9"}, "llmtrain 0.9 is installed, here it is 1.0", "pip install"),
    "no torch": ({"torch": ""}, "has no torch", "pip install torch==2.13.0"),
    "no package": ({"missing": ("xxhash", "pyyaml")}, "has no xxhash, pyyaml", "pip install xxhash pyyaml"),
    "wrong torch": ({"torch": "2.12.1"}, "torch 2.12.1 is installed", "pip install torch==2.13.0"),
    "other python": ({"python": "3.12.1"}, "is Python 3.12.1, most nodes have 3.11.7", "backend.python"),
    "another folder": ({"nonce": ""}, "is not the same folder there as here", "storage.path"),
    "folder of others": ({"writable": False}, "user `me` may not write", "ls -ld /shared/runs"),
    "loopback address": ({"entered_by": "127.0.0.1"}, "its address is 127.0.0.1", "inter_node.interface"),
    "no address": ({"entered_by": "192.0.2.7"}, "192.0.2.7 is not an address of its own", "eth0 10.0.0.3"),
    "clock ahead": ({"time": 1060.0}, "its clock is 60 s ahead", "chrony"),
    "clock behind": ({"time": 900.0}, "its clock is 100 s behind", "chrony"),
    "two with one name": ({"host": "n1"}, "both call themselves `n1`", "hostnamectl set-hostname n3"),
    "one machine twice": ({"host": "n2", "boot": "n2"}, "n2 and n3 are one machine", "once"),
    "address of another": (
        {"entered_by": "10.0.0.1", "addresses": {"eth0": "10.0.0.1"}},
        "n1 and n3 are both reached at 10.0.0.1",
        "inter_node.interface",
    ),
    "disk full": (disk(free=0), "disk: 0 B of 1.0 TB free", "checkpoint prune"),
    "no file left": (disk(inodes_free=0), "inodes: 0 free", "quota of files"),
    "no memory": (
        machine(memory_available=GB // 10),
        "memory: 100.0 MB of 64.0 GB available",
        "end other work",
    ),
    "no GPU": (
        machine(gpus=Gpus(reason="NVML: Driver Not Loaded")),
        "GPUs: 0, the profile promises 1 (NVML: Driver Not Loaded)",
        "nvidia-smi",
    ),
    "GPU that does not answer": (
        machine(gpus=replace(MACHINE.gpus, silent=("3: GPU is lost",))),
        "GPU 3: does not answer: GPU is lost",
        "reboot the node",
    ),
    "driver that does not work": (
        machine(gpus=Gpus(reason="NVML/RM version mismatch", is_broken=True)),
        "GPUs: 0, the profile promises 1 (NVML/RM version mismatch)",
        "dmesg | grep NVRM",
    ),
    "other driver": (
        machine(gpus=replace(MACHINE.gpus, driver="550")),
        "GPU driver: 550, most nodes have 580",
        "the same software",
    ),
    "other GPU": (gpu(name="A100"), "GPUs: 1 x A100, most nodes have 1 x H100", "leave the node out"),
    "broken GPU memory": (
        gpu(row_remap_failed=True),
        "a memory row could not be remapped",
        "replace this GPU",
    ),
    "lost GPU": (
        machine(xids=(Xid(code=79, device="0000:3b:00"),)),
        "79 on 0000:3b:00: the GPU has fallen off the bus",
        "reset the GPU",
    ),
    "other NCCL": (machine(nccl="2.27.3"), "NCCL: 2.27.3, most nodes have 2.28.9", "the same software"),
    "other CUDA": (machine(cuda="12.8"), "CUDA runtime: 12.8, most nodes have 13.0", "the same software"),
}
"""Cause -> (what the third of three nodes says otherwise, words of the message, words of the fix)."""

PASSING: Mapping[str, tuple[str, str]] = {
    "job limit of a user": ("sbatch: error: QOSMaxSubmitJobPerUserLimit", "when some have ended"),
    "quota of hours": ("sbatch: error: AssocGrpCPUMinutesLimit", "hours as you may"),
    "policy": ("sbatch: error: Job violates accounting/QOS policy", "when some have ended"),
    "disk of the controller": ("sbatch: error: No space left on device", "is full"),
    "quota of the disk": ("sbatch: error: Disk quota exceeded", "is full"),
    "absent controller": ("sbatch: error: Unable to contact slurm controller", "scontrol ping"),
    "silent controller": ("sbatch: error: Socket timed out on send/recv operation", "scontrol ping"),
    "no configuration": ("sbatch: error: could not establish a configuration", "scontrol ping"),
    "no munge": ("sbatch: error: Munge encode failed: Failed to access socket", "munged"),
}
"""Cause -> (what SLURM says, words of the fix); no field of the profile is to blame."""


STEPS: Mapping[str, tuple[str, str]] = {
    "ended allocation": ("srun: error: Unable to confirm allocation for job 7: Invalid job id", "resume"),
    "expired allocation": ("srun: error: Job/step already completing or completed", "resume"),
    "expired credential": ("srun: error: Task launch failed on node n1: Job credential expired", "clock"),
    "munge on a node": ("srun: error: Munge encode failed: Invalid credential", "munged"),
    "unknown node": ("srun: error: Unable to resolve 'n1': Unknown host", "NodeAddr"),
    "lost node": ("srun: error: Node failure on n1", "scontrol show node"),
    "step too large": ("srun: error: Requested node configuration is not available", "srun_args"),
}
"""Cause -> (what srun says inside of a job, words of the fix)."""


def three(changes: dict[str, object]) -> dict[str, Report]:
    reports = {}
    for index, name in enumerate(("n1", "n2", "n3"), 1):
        address = f"10.0.0.{index}"
        report = replace(GOOD, host=name, boot=name, entered_by=address, addresses={"eth0": address})
        reports[name] = replace(report, **(changes if name == "n3" else {}))  # type: ignore[arg-type]
    return reports


def test_equal_nodes_are_fit() -> None:
    assert problems_of(three({}), EXPECTED) == {}


@pytest.mark.parametrize("cause", NODES)
def test_a_node_that_is_not_fit_is_named_with_its_fix(cause: str) -> None:
    changes, message, fix = NODES[cause]
    found = problems_of(three(changes), EXPECTED)
    assert list(found) == ["n3"]
    text = found["n3"][0].text()
    assert text.startswith("n3: ") and message in text, text
    assert fix in found["n3"][0].hint, text
    assert PreflightError(found["n3"]).exit_status == 1


@pytest.mark.parametrize(("said", "where"), REFUSED)
def test_a_refused_field_is_named_with_its_fix(said: str, where: str) -> None:
    error = refusal("sbatch", said)
    assert (error.exit_status, error.problems[0].where) == (2, where)
    assert error.problems[0].message.startswith("sbatch refuses the job: ") and error.problems[0].hint


@pytest.mark.parametrize("cause", PASSING)
def test_what_no_field_is_to_blame_for_has_a_fix_too(cause: str) -> None:
    said, fix = PASSING[cause]
    error: LlmtrainError = refusal(said.partition(":")[0], said)
    assert error.exit_status == 1
    assert fix in error.problems[0].hint, error.text()


@pytest.mark.parametrize("cause", STEPS)
def test_a_step_that_does_not_start_has_a_fix(cause: str) -> None:
    said, fix = STEPS[cause]
    assert fix in step_hint(said)
    assert TransportError(said, hint=step_hint(said)).exit_status == 1


@pytest.mark.parametrize("reason", HOPELESS_REASONS)
def test_reasons_to_wait_for_ever_have_a_fix(reason: str) -> None:
    assert len(HOPELESS_REASONS[reason].split()) >= 3


def test_there_are_at_least_sixty_causes() -> None:
    transcripts = read_cases(Path(__file__).parents[1] / "cli" / "bad_input" / "backends.txt")
    causes = [*NODES, *(said for said, _ in REFUSED), *PASSING, *STEPS, *HOPELESS_REASONS]
    causes += [case.says for case in transcripts if "hint:" in case.says]
    assert len(set(causes)) == len(causes) >= 60 + 30
