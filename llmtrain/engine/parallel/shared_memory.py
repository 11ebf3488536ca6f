"""Collectives between ranks of one host on CPUs: data through shared memory, wake-ups through named pipes.

gloo takes a tensor through a TCP socket and two threads of its own, whoever the peer is. Here every member
copies its tensor into its slot, writes one byte to every other member's pipe, and reads the others' slots
when their bytes have come. A member that dies closes its pipes, so that the others notice at once. Rank
order is summation order: all members compute the same bits.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from llmtrain.run.snapshots import SHARED_MEMORY

SLOTS = 4
"""Slots of each member. With at most two operations under way, a member that starts operation k + 4 knows
that all others have finished reading operation k."""
MOST_UNDER_WAY = 2
MOST_MEMBERS = 16
"""Every member writes to every other one."""
LARGEST_SLOT = 8 << 20
"""Bytes; containers often have 64 MB of shared memory in all."""
PREFIX = "llmtrain-group-"
"""Of this module's folders alone: a node's snapshots lie in `llmtrain-<uid>` beside them and must outlive
every group."""
STALE_SECONDS = 600.0
"""A folder exists only while the members of a group connect; an older one was left by a kill in between."""


class _Operation:
    """A collective that this member has started."""

    __slots__ = ("finish",)

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish: Callable[[], None] | None = finish


class SharedMemory:
    """One member's view of a group's slots and pipes."""

    def __init__(self, memory: mmap.mmap, index: int, size: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._index, self._size = index, size
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        self._slots = flat.view(size, SLOTS, slot_bytes)
        self._from: list[int] = [-1] * size
        """Descriptor that brings each member's bytes to this one."""
        self._to: list[int] = []
        self._count = 0
        self._under_way: deque[_Operation] = deque()

    def fits(self, tensor: Tensor) -> bool:
        """Whether a slot can take a tensor."""
        return tensor.numel() * tensor.element_size() <= self.slot_bytes

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum a contiguous tensor over the members, in place; the result is there after the
        returned function."""
        slots = self._publish(tensor, tensor)

        def add() -> None:
            torch.add(slots[0], slots[1], out=tensor)
            for slot in slots[2:]:
                tensor.add_(slot)

        return self._start(add)

    def start_all_gather(self, full: Tensor, part: Tensor) -> Callable[[], None]:
        """Begin to gather every member's `part` into `full`, [size x first, ...]."""
        slots = self._publish(part, part)
        places = full.view(self._size, *part.shape)

        def copy() -> None:
            for place, slot in zip(places, slots, strict=True):
                place.copy_(slot)

        return self._start(copy)

    def start_reduce_scatter(self, part: Tensor, full: Tensor) -> Callable[[], None]:
        """Begin to sum `full` over the members; `part` gets this member's share of the first dimension."""
        slots = self._publish(full, full.view(self._size, *part.shape), self._index)

        def add() -> None:
            torch.add(slots[0], slots[1], out=part)
            for slot in slots[2:]:
                part.add_(slot)

        return self._start(add)

    def _publish(self, tensor: Tensor, shape: Tensor, row: int | None = None) -> list[Tensor]:
        """Copy a tensor into the next slot; return every member's slot, seen as `shape`, or one row of it."""
        while len(self._under_way) >= MOST_UNDER_WAY:
            self._finish_oldest()
        size = tensor.numel() * tensor.element_size()
        slots = [
            member[:size].view(tensor.dtype).view(shape.shape)
            for member in self._slots[:, self._count % SLOTS]
        ]
        slots[self._index].copy_(shape)
        self._count += 1
        try:
            for descriptor in self._to:
                os.write(descriptor, b"\0")
        except BrokenPipeError:
            raise RuntimeError("connection lost: a member of a tensor-parallel group is gone") from None
        return slots if row is None else [slot[row] for slot in slots]

    def _start(self, combine: Callable[[], None]) -> Callable[[], None]:
        operation = _Operation(combine)
        self._under_way.append(operation)

        def wait() -> None:
            while operation.finish is not None:
                self._finish_oldest()

        return wait

    def _finish_oldest(self) -> None:
        operation = self._under_way.popleft()
        for member, descriptor in enumerate(self._from):
            if member != self._index and not os.read(descriptor, 1):
                raise RuntimeError(f"connection lost: member {member} of a tensor-parallel group is gone")
        if operation.finish is not None:
            operation.finish()
        operation.finish = None

    def connect_readers(self, folder: Path) -> None:
        """Open this member's ends to read from; nobody needs to write yet."""
        for member in range(self._size):
            if member != self._index:
                pipe = _pipe(folder, member, self._index)
                self._from[member] = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def connect_writers(self, folder: Path) -> None:
        """Open this member's ends to write to, once all readers are there."""
        for member in range(self._size):
            if member != self._index:
                pipe = _pipe(folder, self._index, member)
                self._to.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))

    def block(self) -> None:
        """From now on, reading waits for the writer."""
        for descriptor in self._from:
            if descriptor >= 0:
                os.set_blocking(descriptor, True)


def open_shared_memory(
    index: int, size: int, slot_bytes: int, exchange: Callable[[str], Sequence[str]]
) -> SharedMemory | None:
    """Connect the members of a group; every member must call it. None, for all of them, when they are not
    on one host or its shared memory does not suffice. `exchange` gathers a text from every member."""
    if size > MOST_MEMBERS:
        return None
    slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if slot_bytes > LARGEST_SLOT:
        return None
    folder = exchange(_make_folder(size, slot_bytes) if index == 0 else "")[0]
    if not folder:
        return None
    opened: SharedMemory | None = None
    try:
        good = False
        with suppress(OSError):
            opened = _attach(Path(folder), index, size, slot_bytes)
            opened.connect_readers(Path(folder))
            good = True
        if not _all_say_yes(exchange, good) or opened is None:
            return None
        good = False
        with suppress(OSError):
            opened.connect_writers(Path(folder))
            good = True
        if not _all_say_yes(exchange, good):
            return None
        opened.block()
        return opened
    finally:
        if (
            index == 0
        ):  # All have it open by now, or will not use it: nothing stays behind, even after a kill.
            shutil.rmtree(folder, ignore_errors=True)


def _make_folder(size: int, slot_bytes: int) -> str:
    """A folder with the slots' file and a pipe for every pair; "" when the host cannot have one."""
    _remove_stale()
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY))
    except OSError:
        return ""
    try:
        with (folder / "slots").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size * SLOTS * slot_bytes)
        for source in range(size):
            for target in range(size):
                if source != target:
                    os.mkfifo(_pipe(folder, source, target))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        return ""
    return str(folder)


def _remove_stale() -> None:
    """Remove what killed groups of this user left behind."""
    for folder in SHARED_MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid() and time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _attach(folder: Path, index: int, size: int, slot_bytes: int) -> SharedMemory:
    with (folder / "slots").open("r+b") as file:
        return SharedMemory(mmap.mmap(file.fileno(), size * SLOTS * slot_bytes), index, size, slot_bytes)


def _pipe(folder: Path, source: int, target: int) -> Path:
    return folder / f"{source}-{target}"


def _all_say_yes(exchange: Callable[[str], Sequence[str]], yes: bool) -> bool:
    return all(answer == "yes" for answer in exchange("yes" if yes else "no"))
