"""The lease: at most one supervisor writes a run, and one that lost the lease finds out before it writes.

The folder `lease/` holds one file for every supervisor that ever held it: `00000001.json`, `00000002.json`
and so on. The highest number is the holder, and the number is its fencing token. Taking over means creating
the next number, which exactly one of several candidates can do; so no lock call is needed and a shared file
system will do.

A holder on this machine is judged by its process. A holder elsewhere (another machine, a container, an
earlier boot) is judged by the age of its file, which the holder touches every few seconds; both times come
from the file server's clock.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtrain.errors import RunError, UsageError
from llmtrain.run.atomic import create_once, write_atomic
from llmtrain.run.layout import RunDir
from llmtrain.run.processes import ProcessIdentity, this_process

RENEW_SECONDS = 5.0
"""How often the holder touches its file."""
EXPIRE_SECONDS = 60.0
"""Age after which a holder on another machine counts as dead."""


class LeaseLostError(RunError):
    """Another supervisor has taken the run over; this one must not write any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    """Who holds, or last held, the lease."""

    token: int
    process: ProcessIdentity
    since: float
    """Epoch seconds."""
    released: bool
    age: float
    """Seconds since the holder last renewed."""
    allocation: str = ""
    """The scheduler's job that the holder runs in, where there is one."""

    @property
    def is_alive(self) -> bool:
        """Whether a supervisor must be assumed to be at work."""
        if self.released:
            return False
        return self.process.is_alive() if self.process.is_here() else self.age < EXPIRE_SECONDS

    def describe(self) -> str:
        """`pid 42 on host node1`."""
        return f"pid {self.process.pid} on host {self.process.host}"


class Lease:
    """A lease that this process took; `token` rises with every holder."""

    def __init__(self, folder: Path, token: int, since: float, allocation: str = "") -> None:
        self.folder, self.token, self._since, self._allocation = folder, token, since, allocation
        self._renewed = time.monotonic()
        self._left = threading.Event()

    @property
    def path(self) -> Path:
        """The file of this holder."""
        return _path(self.folder, self.token)

    def check(self) -> None:
        """Raise LeaseLostError unless this process is still the holder; call it before every write."""
        newest = max(_tokens(self.folder), default=0)
        if newest != self.token:
            raise LeaseLostError(
                f"another supervisor has taken over this run (lease {newest}, this one is {self.token})",
                where=str(self.folder),
            )

    def renew(self) -> None:
        """Check, and touch the file when it is due. Raises LeaseLostError."""
        self.check()
        if time.monotonic() - self._renewed >= RENEW_SECONDS:
            os.utime(self.path)
            self._renewed = time.monotonic()

    def keep_fresh(self) -> None:
        """Renew from a thread as long as this process lives and holds the lease: a holder that sweeps nodes
        or prepares a corpus for minutes must not look dead to other machines."""
        threading.Thread(target=self._keep_fresh, name="lease", daemon=True).start()

    def _keep_fresh(self) -> None:
        while not self._left.wait(RENEW_SECONDS):
            with suppress(OSError, LeaseLostError):
                self.renew()

    def release(self) -> None:
        """Say that the holder leaves; harmless when the lease is lost."""
        self._left.set()
        if max(_tokens(self.folder), default=0) == self.token:
            text = _text(this_process(), self._since, released=True, allocation=self._allocation)
            write_atomic(self.path, text)


def acquire(run: RunDir, *, allocation: str = "", dead: int | None = None) -> Lease:
    """Take the lease of a run; raises UsageError when a live supervisor holds it.

    `dead` is the token of a holder that has ended, as its scheduler says, though its file may still be fresh.
    """
    folder = run.lease
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        # The next number after the holder that was judged: had another candidate been quicker, it exists.
        judged = refuse_if_supervised(run, dead=dead)
        token, now = 1 + (judged.token if judged is not None else 0), time.time()
        text = _text(this_process(), now, released=False, allocation=allocation)
        if create_once(_path(folder, token), text):
            return Lease(folder, token, now, allocation)


def refuse_if_supervised(run: RunDir, *, dead: int | None = None) -> LeaseHolder | None:
    """The last holder, who is gone; raises UsageError when a live supervisor holds the lease (the holder with
    the token `dead` is none)."""
    holder = read_holder(run)
    if holder is not None and holder.is_alive and holder.token != dead:
        raise UsageError(
            f"run {run.run_id} is already supervised by {holder.describe()}",
            where=str(run.path),
            hint=f"watch it with `llmtrain status {run.argument} --watch`, "
            f"or end it with `llmtrain stop {run.argument}`",
        )
    return holder


def read_holder(run: RunDir) -> LeaseHolder | None:
    """The last holder of a run's lease, or None when there never was one."""
    while tokens := _tokens(run.lease):
        path = _path(run.lease, max(tokens))
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            age = _file_clock(run.lease) - path.stat().st_mtime
        except FileNotFoundError:
            continue
        return LeaseHolder(
            token=max(tokens),
            process=ProcessIdentity(**raw["process"]),
            since=raw["since"],
            released=raw["released"],
            age=age,
            allocation=raw.get("allocation", ""),
        )
    return None


def _file_clock(folder: Path) -> float:
    """Now, by the clock that stamps files in this folder; by our own where we may not write."""
    probe = folder / f".clock.{os.getpid()}"
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
    except OSError:
        return time.time()
    return now


def _text(process: ProcessIdentity, since: float, *, released: bool, allocation: str = "") -> str:
    value = {"schema": 1, "process": asdict(process), "since": since, "released": released}
    if allocation:
        value["allocation"] = allocation
    return json.dumps(value, indent=2) + "\n"


def _path(folder: Path, token: int) -> Path:
    return folder / f"{token:08d}.json"


def _tokens(folder: Path) -> list[int]:
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()]
