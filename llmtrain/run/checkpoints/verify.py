"""Is a checkpoint whole? Names every fault; and the choice of the newest one without any."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from llmtrain.errors import CheckpointError, Problem
from llmtrain.run.checkpoints.boxes import cover_fault
from llmtrain.run.checkpoints.chain import read_chain
from llmtrain.run.checkpoints.checksum import has_checksum
from llmtrain.run.checkpoints.folder import (
    Checkpoint,
    ever_committed,
    list_checkpoints,
    lost_pointer,
    open_regular,
    parse_name,
)
from llmtrain.run.checkpoints.manifest import Manifest, ShardEntry
from llmtrain.run.checkpoints.notes import notes_faults
from llmtrain.run.checkpoints.parse import may_pass, read_manifest

MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class Selection:
    """The checkpoint to restore, and why newer ones were passed over."""

    checkpoint: Checkpoint | None
    """None: the run has never committed a checkpoint."""
    manifest: Manifest | None
    skipped: tuple[Problem, ...] = ()

    @property
    def reason(self) -> str:
        """Why newer ones were skipped, in one line; "" when there are none."""
        return "; ".join(f"{_place(Path(problem.where))}: {problem.message}" for problem in self.skipped)


def verify(path: Path, *, run_id: str = "", recipe_digest: str = "", checksums: bool = True) -> list[Problem]:
    """Return all faults of a checkpoint: manifest, run, coverage of every tensor, size and checksum of every
    shard; and of those that an incremental one builds upon.

    `run_id` and `recipe_digest` are compared when given. `checksums=False` looks at sizes only, without
    reading the shards.
    """
    try:
        return _inspect(path, run_id, recipe_digest, checksums)[1]
    except CheckpointError as error:
        return list(error.problems)


def newest_valid(
    root: Path,
    *,
    run_id: str = "",
    recipe_digest: str = "",
    checksums: bool = True,
    rejected: Mapping[str, Sequence[Problem]] = MappingProxyType({}),
) -> Selection:
    """Return the newest checkpoint without a fault, and the faults of the newer ones.

    `rejected` are faults that the caller has found in checkpoints, by name. Returns a selection without
    checkpoint only when the run has never committed one. Raises CheckpointError, naming every fault, when it
    has but none is left whole: a run must not silently begin again.
    """
    checkpoints = list_checkpoints(root)
    skipped = lost_pointer(root, checkpoints)
    for checkpoint in checkpoints:
        if checkpoint.name in rejected:
            skipped.extend(rejected[checkpoint.name])
            continue
        try:
            manifest, problems = _inspect(checkpoint.path, run_id, recipe_digest, checksums)
        except CheckpointError as error:
            problems = list(error.problems)
        else:
            if not problems:
                return Selection(
                    checkpoint, manifest, tuple(dict.fromkeys(skipped))
                )  # a chain's base counts once
        skipped.extend(problems)
    if not ever_committed(root):
        return Selection(None, None)
    raise _nothing_left(root, list(dict.fromkeys(skipped)))


def verify_shards(path: Path, shards: Sequence[ShardEntry], *, checksums: bool = True) -> list[Problem]:
    """Faults of some shards of a checkpoint, so that ranks can share the reading; in the order of
    `shards`."""
    if not shards:
        return []
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1, len(shards))) as pool:
        faults = pool.map(lambda shard: _shard_problem(path / shard.file, shard, checksums), shards)
        return [fault for fault in faults if fault is not None]


def _inspect(path: Path, run_id: str, recipe_digest: str, checksums: bool) -> tuple[Manifest, list[Problem]]:
    if path.is_symlink():
        raise CheckpointError("is a symbolic link, which is never followed", where=str(path))
    if not path.is_dir():
        raise CheckpointError("missing" if not path.exists() else "is not a folder", where=str(path))
    manifest = read_manifest(path)
    problems = [*_identity_faults(path, manifest, run_id, recipe_digest), *coverage_problems(path, manifest)]
    for link in read_chain(path, manifest):
        problems.extend(verify_shards(link.path, link.manifest.shards, checksums=checksums))
    return manifest, problems


def _identity_faults(path: Path, manifest: Manifest, run_id: str, recipe_digest: str) -> list[Problem]:
    info = manifest.info
    problems: list[Problem] = []
    if run_id and info.run_id != run_id:
        problems.append(Problem(str(path), f"is of run {info.run_id!r}, not of {run_id!r}"))
    if recipe_digest and info.recipe_digest != recipe_digest:
        problems.append(
            Problem(str(path), f"was written for recipe digest {info.recipe_digest!r}, not {recipe_digest!r}")
        )
    problems += [Problem(str(path), fault) for fault in notes_faults(info)]
    if path.name.startswith("step-") and not path.name.startswith(f"step-{info.step:08d}"):
        problems.append(Problem(str(path), f"its manifest is of step {info.step}"))
    return problems


def coverage_problems(path: Path, manifest: Manifest) -> list[Problem]:
    """One problem for every tensor whose pieces do not cover it exactly once."""
    problems: list[Problem] = []
    for key, entry in manifest.tensors.items():
        fault = cover_fault(entry.shape, [piece.geometry for piece in entry.pieces])
        if fault:
            problems.append(Problem(str(path), f"tensor {key!r}: {fault}"))
    return problems


def _shard_problem(path: Path, shard: ShardEntry, checksums: bool) -> Problem | None:
    try:
        fault = _shard_fault(path, shard, checksums)
    except FileNotFoundError:
        fault = "missing"
    except OSError as error:
        if path.is_symlink():
            return Problem(str(path), "is a symbolic link, which is never followed")
        return Problem(str(path), f"cannot be read: {error.strerror}", may_pass=may_pass(error))
    return Problem(str(path), fault) if fault else None


def _shard_fault(path: Path, shard: ShardEntry, checksums: bool) -> str:
    """What is wrong with a shard that can be read, "" for nothing. Raises OSError when it cannot."""
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size != shard.bytes:
            how = "empty" if not size else "truncated" if size < shard.bytes else "too long"
            return f"{how}: {size} bytes, the manifest says {shard.bytes}"
        damaged = checksums and not has_checksum(stream.fileno(), shard.checksum)
    return "damaged: its checksum is not the manifest's" if damaged else ""


def _place(path: Path) -> str:
    """`step-00000030/shard-00001.safetensors`: a file of a checkpoint with the checkpoint's name."""
    return f"{path.parent.name}/{path.name}" if parse_name(path.parent.name) else path.name


def _nothing_left(root: Path, skipped: list[Problem]) -> CheckpointError:
    error = CheckpointError(
        "the run has committed checkpoints, but none is whole; it does not start over by itself",
        where=str(root),
        hint="repair or restore one of the checkpoints below; `llmtrain checkpoint verify RUN` checks them",
    )
    error.problems = (*error.problems, *skipped)
    return error
