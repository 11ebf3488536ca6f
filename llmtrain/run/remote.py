"""`remote.json`: where a run really lives, when it was launched from a machine without the cluster's disks.

Its folder here holds what was launched; record, events, logs and checkpoints are on the login node.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from llmtrain.run.atomic import write_json
from llmtrain.run.job_file import read_document
from llmtrain.run.layout import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """What `remote.json` holds."""

    schema: int = 1
    login: str
    """`[user@]host[:port]` of the login node."""
    path: str
    """The run's folder there."""
    python: str
    """The interpreter that has llmtrain there."""


def write_remote(run: RunDir, remote: Remote) -> None:
    """Write `remote.json`. Raises OSError."""
    write_json(run.remote_json, asdict(remote))


def read_remote(run: RunDir) -> Remote | None:
    """Where a run lives, None for one that lives in its folder. Raises RunError for a damaged file."""
    path = run.remote_json
    return read_document(path, Remote) if path.exists() else None
