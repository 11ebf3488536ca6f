"""Fixtures of the SSH tests: a bed of real nodes, and a home directory whose ~/.ssh leads to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtrain.config.hosts import Host
from llmtrain.transport.ssh import SshTransport
from llmtrain.transport.ssh_settings import SshConfig, SshOptions
from tests.support.beds import SshBed, ssh_bed, ssh_beds

__all__ = ["ssh_bed", "ssh_beds"]

Connect = Callable[..., SshTransport]


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
        config = SshConfig(SshOptions(**options))
        made.append(SshTransport(Host(name=name, user=user, port=port), config))
        return made[-1]

    yield connect
    for transport in made:
        transport.close()
