"""The `ssh` section of a cluster profile's backend: which nodes, and how to log in to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from llmtrain.config.fields import Bounds, PositiveDuration, RelativeTo, Verbatim

USER_CONFIG = "~/.ssh/config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SshConfig:
    """Nodes without a scheduler. What ~/.ssh/config says holds, unless it is said here."""

    hosts: tuple[Annotated[str, Verbatim()], ...] = ()
    """Nodes in the order of their ranks, `[user@]name[:port]` or ranges like `node[01-32]`; the first `nodes`
    of them are used."""
    hostfile: Annotated[str, RelativeTo()] = ""
    """A file with one such node or range a line, in place of `hosts`; `slots=N` may follow a name."""
    user: str = ""
    """Login name on the nodes; default: as ~/.ssh/config says, else yours."""
    port: Annotated[int, Bounds(low=1, high=65535)] | None = None
    """Port of the nodes' sshd; default: as ~/.ssh/config says, else 22."""
    identity_file: Annotated[str, RelativeTo()] = ""
    """Private key to log in with, besides those of the agent and of ~/.ssh/config."""
    config_file: Annotated[str, RelativeTo((USER_CONFIG,))] = USER_CONFIG
    """Configuration file of the SSH client; another one stands alone, as with `ssh -F`."""
    connect_timeout: PositiveDuration = 10.0
    """A node that is silent for so long, in seconds, while it is connected to is given up."""
    push: bool = False
    """Whether this llmtrain is sent to nodes, in place of one installed there; `backend.python` then needs
    only what llmtrain depends on. It lies in `.code` below `storage.path`, in a folder by its digest, and
    stays there, also when a launch is refused: other runs may use it, and the next launch is quicker."""
    retries: Annotated[int, Bounds(low=0, high=3)] = 3
    """Further tries after a node has refused a connection."""
