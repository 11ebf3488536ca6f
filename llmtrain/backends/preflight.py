"""From what nodes say about themselves to what is wrong with them, each mismatch named. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmtrain.backends.health import judge
from llmtrain.config.cluster import ClusterProfile
from llmtrain.errors import Problem, RunError
from llmtrain.probe.facts import Disk, Machine, WriteTest


class PreflightError(RunError):
    """Nodes are not fit to start; carries every problem of every node."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems[0].message if problems else "nodes are not fit to start")
        self.problems = tuple(problems)


SAID_OTHERWISE = ("torch", "write test")
"""Checks of the doctor that have a problem of their own here."""
CLOCK_SECONDS = 5.0
"""Clocks that differ by more than this make event times and checkpoints' ages misleading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The machine as its own llmtrain sees it."""

    machine: Machine
    disk: Disk | None = None
    """Of the folder of the run."""
    write: WriteTest | None = None
    """None: nothing was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `node_report.py` found on one node."""

    host: str
    boot: str
    machine: str
    executable: str
    python: str
    llmtrain: str
    """Version, or `SomeError: text`."""
    torch: str
    """Version, empty when it is not installed."""
    missing: tuple[str, ...] = ()
    """Packages beside torch that agents and ranks need, by pip's names."""
    time: float
    addresses: Mapping[str, str]
    """Interface -> IPv4 address."""
    entered_by: str
    """Address of the node that the connection came in on."""
    nonce: str
    writable: bool
    user: str
    health: Health | None = None
    """None: the node could not tell."""
    seen_at: float = 0.0
    """Our own clock when the report was asked for and when it came, in the middle."""
    uncertainty: float = 0.0
    """Half the time that the question took."""

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        """UUIDs of its GPUs, in their order; () when it cannot tell."""
        return () if self.health is None else tuple(gpu.uuid for gpu in self.health.machine.gpus.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What every node is held against."""

    llmtrain: str
    folder: str
    """The run directory, or the folder of run directories."""
    nonce: str
    interface: str = ""
    several: bool = True
    """Whether ranks of several nodes talk to each other."""
    gpus: int = 0
    """GPUs that the profile promises on every node."""
    distant: bool = False
    """Whether nodes share the folder with each other, and not with this machine."""


def problems_of(reports: Mapping[str, Report], expected: Expected) -> dict[str, list[Problem]]:
    """What is wrong with each node; nodes with nothing wrong are left out."""
    torch, python = _usual(reports, "torch"), _usual(reports, "python")
    machines = {name: report.health.machine for name, report in reports.items() if report.health}
    found: dict[str, list[Problem]] = {}
    for name, report in reports.items():
        problems = [
            *_software(name, report, expected, torch, python),
            *_folder(name, report, expected),
            *_network(name, report, expected),
            *_clock(name, report),
            *_health(name, report, expected),
            *_other_than_most(name, machines, gpus=expected.gpus > 0),
        ]
        if problems:
            found[name] = problems
    for name, problem in _identities(reports, expected.interface):
        found.setdefault(name, []).append(problem)
    return found


def address_of(report: Report, interface: str) -> tuple[str, str]:
    """(address, interface) that the other nodes reach a node by; either is empty when it is not known."""
    if interface:
        return report.addresses.get(interface, ""), interface
    wanted = report.entered_by.partition("%")[0]
    names = [name for name, address in report.addresses.items() if address == wanted]
    return wanted, names[0] if names else ""


def _usual(reports: Mapping[str, Report], field: str) -> str:
    """The value that most nodes have; of equals, the first node's."""
    values = [getattr(report, field) for report in reports.values()]
    return str(Counter(value for value in values if value).most_common(1)[0][0]) if any(values) else ""


def _software(name: str, report: Report, expected: Expected, torch: str, python: str) -> Iterator[Problem]:
    pip = f"{report.executable} -m pip install"
    if ":" in report.llmtrain:
        message = f"{report.executable} has no llmtrain ({report.llmtrain})"
        hint = f"`{pip} llmtrain=={expected.llmtrain}` on {name}, or another interpreter with backend.python"
        hint += "; backend.ssh.push sends this one"
        yield Problem(name, message, hint)
    elif report.llmtrain != expected.llmtrain:
        message = f"llmtrain {report.llmtrain} is installed, here it is {expected.llmtrain}"
        yield Problem(name, message, f"`{pip} llmtrain=={expected.llmtrain}` on {name}")
    elif report.missing:
        # A pushed llmtrain brings no packages along.
        message = f"{report.executable} has no {', '.join(report.missing)}"
        yield Problem(name, message, f"`{pip} {' '.join(report.missing)}` on {name}")
    if not report.torch:
        wanted = f"torch=={torch}" if torch else "torch"
        yield Problem(name, f"{report.executable} has no torch", f"`{pip} {wanted}` on {name}")
    elif report.torch != torch:
        message = f"torch {report.torch} is installed, most nodes have {torch}"
        yield Problem(name, message, f"`{pip} torch=={torch}` on {name}")
    if _minor(report.python) != _minor(python):
        message = f"{report.executable} is Python {report.python}, most nodes have {python}"
        yield Problem(name, message, "the same interpreter everywhere: backend.python")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _folder(name: str, report: Report, expected: Expected) -> Iterator[Problem]:
    if report.nonce != expected.nonce:
        here = "on the first node" if expected.distant else "here"
        hint = "checkpoints need a folder that all nodes and this machine share (storage.path)"
        if expected.distant:
            hint = "checkpoints need a folder that all nodes share (storage.path), or a run of one node"
        elif report.nonce == "":
            hint += "; if only the nodes share it: storage.shared: nodes"
        yield Problem(name, f"{expected.folder} is not the same folder there as {here}", hint)
    elif not report.writable:
        message = f"user `{report.user}` may not write to {expected.folder}"
        hint = f"`ls -ld {expected.folder}` says who may; another user: backend.ssh.user"
        yield Problem(name, message, hint)


def _network(name: str, report: Report, expected: Expected) -> Iterator[Problem]:
    address, _ = address_of(report, expected.interface)
    if expected.interface and not address:
        known = ", ".join(sorted(report.addresses)) or "none"
        message = f"there is no interface {expected.interface} with an IPv4 address; there are: {known}"
        yield Problem(name, message, "inter_node.interface names an interface that every node has")
    elif expected.several and _is_loopback(address):
        yield Problem(
            name,
            f"its address is {address}, which on every other node means that node itself",
            "name the node by an address that the others reach, or set inter_node.interface",
        )
    elif expected.several and address.count(".") == 3 and address not in report.addresses.values():
        # E.g. that of a login node, which a name stands for there and not here.
        own = ", ".join(f"{name} {each}" for name, each in report.addresses.items() if not _is_loopback(each))
        message = f"{address} is not an address of its own, so that ranks elsewhere would not meet there"
        yield Problem(name, message, f"set inter_node.interface to one of: {own or 'none'}")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _clock(name: str, report: Report) -> Iterator[Problem]:
    skew = report.time - report.seen_at
    if report.seen_at and abs(skew) - report.uncertainty > CLOCK_SECONDS:
        direction = "ahead of" if skew > 0 else "behind"
        message = f"its clock is {abs(skew):.0f} s {direction} this machine's"
        yield Problem(name, message, "synchronise clocks: `systemctl restart chrony` or systemd-timesyncd")


def _health(name: str, report: Report, expected: Expected) -> Iterator[Problem]:
    """What keeps ranks from working on the machine; what merely may is the doctor's to tell."""
    health = report.health
    if health is None:
        return
    for check in judge(health.machine, health.disk, health.write, gpus=expected.gpus):
        if check.level == "failure" and check.name not in SAID_OTHERWISE:
            yield Problem(name, f"{check.name}: {check.found}", check.hint)


def _other_than_most(name: str, machines: Mapping[str, Machine], *, gpus: bool) -> Iterator[Problem]:
    """What came with torch, and the GPUs that a run uses, must be the same everywhere: collectives would fail
    or hang."""
    if name not in machines:
        return
    traits = [
        ("NCCL", {each: machine.nccl for each, machine in machines.items()}),
        ("CUDA runtime", {each: machine.cuda for each, machine in machines.items()}),
    ]
    if gpus:
        traits.append(("GPU driver", {each: machine.gpus.driver for each, machine in machines.items()}))
        traits.append(("GPUs", {each: gpus_text(machine) for each, machine in machines.items()}))
    for what, values in traits:
        usual, _ = Counter(values.values()).most_common(1)[0]
        if values[name] != usual:
            message = f"{what}: {values[name] or 'none'}, most nodes have {usual or 'none'}"
            yield Problem(name, message, "the same software and hardware everywhere, or leave the node out")


def gpus_promised(cluster: ClusterProfile) -> int:
    """GPUs that every node of a profile must have."""
    return 0 if cluster.accelerator == "cpu" else cluster.gpus_per_node


def gpus_text(machine: Machine) -> str:
    """`8 x NVIDIA H100 80GB HBM3`; empty without GPUs."""
    names = Counter(gpu.name for gpu in machine.gpus.gpus)
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def _identities(reports: Mapping[str, Report], interface: str) -> Iterator[tuple[str, Problem]]:
    """Two names for one machine, and one name for two machines."""
    machines: dict[tuple[str, str, str], str] = {}
    hosts: dict[str, str] = {}
    places: dict[str, str] = {}
    for name, report in reports.items():
        machine = (report.boot, report.machine, report.host)
        if machine in machines:
            other = machines[machine]
            message = f"{other} and {name} are one machine, which calls itself `{report.host}`"
            yield name, Problem(name, message, "name every machine once in backend.ssh.hosts")
        elif report.host in hosts:
            other = hosts[report.host]
            message = f"{other} and {name} both call themselves `{report.host}`"
            yield name, Problem(name, message, f"`hostnamectl set-hostname {name}` there")
        elif (address := address_of(report, interface)[0]) in places and not _is_loopback(address):
            message = f"{places[address]} and {name} are both reached at {address}"
            hint = "inter_node.interface names an interface on which every node has an address of its own"
            yield name, Problem(name, message, hint)
        places.setdefault(address_of(report, interface)[0] or name, name)
        machines.setdefault(machine, name)
        hosts.setdefault(report.host, name)
