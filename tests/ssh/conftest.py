"""Fixtures of the SSH tests: a bed of real nodes, and a home directory whose ~/.ssh leads to it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.hosts import Host
from llmtrain.config.ssh import SshConfig
from llmtrain.transport.ssh import SshTransport
from llmtrain.transport.ssh_settings import OpenSshConfig
from tests.support.beds import SshBed, ssh_bed, ssh_beds

__all__ = ["ssh_bed", "ssh_beds"]

LOCAL = ("127.", "::1", "10.77.")
Connect = Callable[..., SshTransport]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere, but for the bed, whose addresses cannot leave the machine."""
    connect = socket.socket.connect

    def bed_only(self: socket.socket, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else ""
        if self.family in (socket.AF_INET, socket.AF_INET6) and not host.startswith(LOCAL):
            raise AssertionError(f"a test tried to reach {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", bed_only)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, with an empty ~/.ssh and no agent."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


@pytest.fixture
def bed_home(home: Path, ssh_bed: SshBed) -> Path:
    """A home whose ~/.ssh/config knows the nodes of the bed."""
    (home / ".ssh" / "config").write_text(ssh_bed.ssh_config.read_text())
    return home


@pytest.fixture
def to(bed_home: Path) -> Iterator[Connect]:
    """`to("node1", retries=0)`: a transport to a node; closed after the test."""
    made: list[SshTransport] = []

    def connect(name: str, *, user: str = "", port: int | None = None, **options: object) -> SshTransport:
        config = OpenSshConfig(SshConfig(**options))
        made.append(SshTransport(Host(name=name, user=user, port=port), config))
        return made[-1]

    yield connect
    for transport in made:
        transport.close()
