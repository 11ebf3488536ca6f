"""Real test beds as fixtures: nodes in namespaces, each with its own sshd (tests/beds/README.md).

A bed needs root, namespaces and Debian packages. Where it cannot be had, its tests skip and say why; with
LLMTRAIN_TESTS_MUST_RUN=1 they fail instead.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn

import pytest

SCRIPTS = Path(__file__).parents[1] / "beds"
MUST_RUN = "LLMTRAIN_TESTS_MUST_RUN"
SLOTS = range(32)
"""Beds that may be up on one machine at once, whoever started them."""
USER_ID = 61000
BOOT = {"power", "crash"}
"""Faults that a node comes back from by booting."""


@dataclass
class SshBed:
    """Nodes node1 .. nodeN, reachable with `ssh -F ssh_config NODE`."""

    work: Path
    names: tuple[str, ...]
    variables: dict[str, str]
    net: str
    """First three octets of the addresses; node K has the last octet K."""
    _broken: dict[str, set[str]] = field(default_factory=dict)
    _mounted: list[tuple[str, str]] = field(default_factory=list)

    @property
    def ssh_config(self) -> Path:
        """What a user would have as ~/.ssh/config."""
        return self.work / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        """Host keys of all nodes."""
        return self.work / "known_hosts"

    @property
    def key(self) -> Path:
        """The private key that the nodes accept, for any user."""
        return self.work / "id_ed25519"

    def address(self, name: str) -> str:
        """IPv4 address of a node."""
        return f"{self.net}.{self.names.index(name) + 1}"

    def fault(self, kind: str, name: str, argument: str = "") -> None:
        """Break something (ssh_bed.sh --help); undone after the test."""
        self._broken.setdefault(name, set()).add(kind)
        self._script(kind, name, str(self.work), *([argument] if argument else []))

    def run(self, name: str, *argv: str, check: bool = True) -> str:
        """Run a command inside a node, past its network and sshd; its standard output."""
        done = subprocess.run(
            [SCRIPTS / "ssh_bed.sh", "exec", name, self.work, *argv],
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, f"{argv} on {name}: {done.stderr}"
        return done.stdout

    def processes(self, name: str, pattern: str) -> list[str]:
        """Command lines of a node's processes that contain `pattern`."""
        lines = self.run(name, "ps", "-eo", "pid=,args=", "ww").splitlines()
        return [line.strip() for line in lines if pattern in line and "ps -eo" not in line]

    def add_user(self, name: str, user: str, *, shell: str = "/bin/sh") -> None:
        """Give a node one more user, known to that node alone; gone after the test."""
        home = self.work / "nodes" / name / f"home-{user}"
        home.mkdir(exist_ok=True)
        os.chown(home, USER_ID, USER_ID)
        lines = {
            "passwd": f"{user}:x:{USER_ID}:{USER_ID}::{home}:{shell}",
            "group": f"{user}:x:{USER_ID}:",
            "shadow": f"{user}:*:19000:0:99999:7:::",
        }
        for file, line in lines.items():
            copy = self.work / "nodes" / name / f"{file}-{user}"
            copy.touch(mode=0o600 if file == "shadow" else 0o644)
            copy.write_text(f"{Path('/etc', file).read_text().rstrip()}\n{line}\n")
            self.run(name, "mount", "--bind", str(copy), f"/etc/{file}")
            self._mounted.append((name, f"/etc/{file}"))

    def restore(self) -> None:
        """Undo every fault."""
        while self._mounted:
            name, place = self._mounted.pop()
            self.run(name, "umount", place, check=False)
        while self._broken:
            name, kinds = self._broken.popitem()
            if kinds & BOOT:
                self._script("boot", name, str(self.work))
                continue
            if "freeze" in kinds:
                self._script("thaw", name, str(self.work))
            self._script("heal", name, str(self.work))
            if "sshd-stop" in kinds:
                self._script("sshd-start", name, str(self.work))

    def up(self) -> None:
        """Start the nodes; what an earlier owner of the slot left is removed first."""
        owner = Path(f"/run/bed-{self.variables['BED_NAME']}/work")
        if owner.exists() and (left := owner.read_text().strip()) != str(self.work):
            subprocess.run(
                [SCRIPTS / "ssh_bed.sh", "down", left], env=self._environment(), check=False, timeout=120
            )
        self._script("up", str(len(self.names)), str(self.work))

    def down(self) -> None:
        """Remove everything."""
        self._script("down", str(self.work))

    def _script(self, *arguments: str) -> None:
        done = subprocess.run(
            [SCRIPTS / "ssh_bed.sh", *arguments],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        if done.returncode:
            raise BedError(f"ssh_bed.sh {' '.join(arguments)}: {done.stderr.strip()}")

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.variables}


class BedError(Exception):
    """A bed script failed; carries what it said."""


class SshBeds:
    """Beds by their number of nodes; each is started once and kept for the session."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._beds: dict[int, SshBed] = {}

    def nodes(self, count: int) -> SshBed:
        """A bed of `count` nodes; skips or fails the test when there can be none."""
        if count not in self._beds:
            if os.geteuid():
                unavailable("a test bed needs root, for namespaces and sshd")
            if shutil.which("ip") is None and shutil.which("apt-get") is None:
                unavailable("a test bed needs iproute2, or apt-get to install it")
            slot, lock = _free_slot()
            self._stack.callback(lock.close)
            work = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="llmtrain-bed-")))
            work.chmod(0o755)  # A node's other users have to read the keys that may log in.
            bed = SshBed(
                work=work,
                names=tuple(f"node{index}" for index in range(1, count + 1)),
                variables={"BED_NAME": f"lt{slot}", "BED_NET": f"10.77.{100 + slot}"},
                net=f"10.77.{100 + slot}",
            )
            try:
                self._stack.callback(bed.down)
                bed.up()
            except BedError as error:
                unavailable(str(error))
            self._beds[count] = bed
        return self._beds[count]


def unavailable(reason: str) -> NoReturn:
    """Skip the test, or fail it where everything must run."""
    if os.environ.get(MUST_RUN) == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def ssh_beds() -> Iterator[SshBeds]:
    """Beds of any size: `ssh_beds.nodes(2)`."""
    with ExitStack() as stack:
        yield SshBeds(stack)


@pytest.fixture
def ssh_bed(ssh_beds: SshBeds) -> Iterator[SshBed]:
    """Five nodes, whole again after the test."""
    bed = ssh_beds.nodes(5)
    yield bed
    bed.restore()


def _free_slot() -> tuple[int, IO[str]]:
    """A bed name and subnet that no other test session uses; held as long as the file is open."""
    for slot in SLOTS:
        lock = Path(f"/run/llmtrain-bed-{slot}.lock").open("w")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        return slot, lock
    unavailable(f"{len(SLOTS)} test beds are up on this machine already")
