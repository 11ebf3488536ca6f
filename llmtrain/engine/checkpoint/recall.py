"""Restoring from the nodes' memory: what a node lacks comes from nodes that have it; only shards that its
ranks need travel."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmtrain.engine.checkpoint.copies import Incoming, Outgoing, exchange_files
from llmtrain.engine.checkpoint.load import load_pieces, shards_needed
from llmtrain.engine.checkpoint.pieces import Piece, Ranks
from llmtrain.engine.checkpoint.save import try_together
from llmtrain.errors import CheckpointError
from llmtrain.run.atomic import write_atomic
from llmtrain.run.checkpoints import Manifest, verify_shards
from llmtrain.run.checkpoints.commit import gather_manifest
from llmtrain.run.checkpoints.manifest import MANIFEST, sidecar_name
from llmtrain.run.checkpoints.parse import read_manifest
from llmtrain.run.snapshots import drop_strangers, make_private, origin, shards_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank finds its node's part of a snapshot."""

    folder: Path
    """The snapshot's folder in shared memory; it may be missing on a node that has come new."""
    rescued: Path
    """Shards that nodes without ranks had to give, on the shared file system."""
    nodes: tuple[tuple[int, ...], ...]
    """Ranks of every node now."""
    run_created: float
    """Tells the run's snapshots from those of one that had its folder before."""


class Recall:
    """A snapshot that lies in the nodes' memory, as all ranks of a new attempt restore it together."""

    def __init__(self, place: Place, ranks: Ranks, device: torch.device) -> None:
        """`device` is where the process group's tensors lie."""
        self._place, self._ranks, self._device = place, ranks, device
        self._node = next(number for number, node in enumerate(place.nodes) if ranks.rank in node)
        self._is_leader = place.nodes[self._node][0] == ranks.rank

    def read(self, pieces: Sequence[Piece], check: Callable[[Manifest], None]) -> Manifest:
        """Fill the pieces and return what was restored; `check` may refuse it before. Raises CheckpointError
        on all ranks alike when it is not complete, damaged, or refused; then nothing can be said of the
        pieces' content."""
        folder = self._place.folder
        found = [json.loads(told) for told in self._together(self._look)]
        holders = self._holders(found)
        manifest = self._manifest(found)
        missing = sorted(set(range(len(manifest.shards))) - holders.keys())
        if missing:
            raise CheckpointError(f"shards {missing[:8]} are on no node", where=str(folder))
        self._together(lambda: check(manifest))
        needed = self._together(lambda: json.dumps(sorted(shards_needed(folder, manifest, pieces))))
        wanted = [
            sorted({shard for rank in ranks for shard in json.loads(needed[rank])})
            for ranks in self._place.nodes
        ]
        self._together(lambda: self._fetch(manifest, holders, wanted))
        self._together(lambda: self._verify(manifest, wanted[self._node]))
        self._together(lambda: load_pieces(folder, pieces, manifest))
        return manifest

    def _look(self) -> str:
        """What this node holds: the manifest, and the sidecars of its shards."""
        folder = self._place.folder
        if not self._is_leader:
            return json.dumps({})
        make_private(folder.parent)
        drop_strangers(folder.parent, self._place.run_created)
        folder.mkdir(exist_ok=True)
        if self._node == 0 and self._place.rescued.is_dir():
            for path in self._place.rescued.iterdir():
                shutil.copyfile(path, folder / path.name, follow_symlinks=False)
        path = folder / MANIFEST
        manifest = path.read_text(encoding="utf-8") if path.exists() else ""
        sidecars = {
            shard: (folder / sidecar_name(shard)).read_text(encoding="utf-8") for shard in shards_in(folder)
        }
        return json.dumps({"manifest": manifest, "sidecars": sidecars})

    def _holders(self, found: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
        """Shard -> nodes that hold it."""
        holders: dict[int, list[int]] = {}
        for node, ranks in enumerate(self._place.nodes):
            for shard in found[ranks[0]].get("sidecars", ()):
                holders.setdefault(int(shard), []).append(node)
        return holders

    def _manifest(self, found: Sequence[dict[str, Any]]) -> Manifest:
        """The whole manifest, put together from all sidecars in every node's folder."""
        folder = self._place.folder

        def fill() -> None:
            if not self._is_leader:
                return
            for told in found:
                if told.get("manifest"):
                    write_atomic(folder / MANIFEST, told["manifest"])
                for shard, text in told.get("sidecars", {}).items():
                    if not (folder / sidecar_name(int(shard))).exists():
                        write_atomic(folder / sidecar_name(int(shard)), text)

        self._together(fill)
        gathered: list[Manifest] = []

        def gather() -> None:
            head = read_manifest(folder)
            gathered.append(gather_manifest(folder, head.info, origin(head)[0]))

        self._together(gather)
        return gathered[0]

    def _fetch(
        self, manifest: Manifest, holders: Mapping[int, Sequence[int]], wanted: Sequence[Sequence[int]]
    ) -> None:
        """Let leaders send each other what their nodes lack, in one order that all know."""
        outgoing, incoming = [], []
        for node, shards in enumerate(wanted):
            for shard in shards:
                if node in holders[shard]:
                    continue
                source = holders[shard][(node + shard) % len(holders[shard])]
                path = self._place.folder / manifest.shards[shard].file
                if self._is_leader and source == self._node:
                    outgoing.append(Outgoing(path, self._place.nodes[node][0]))
                if self._is_leader and node == self._node:
                    size = manifest.shards[shard].bytes
                    incoming.append(Incoming(path, self._place.nodes[source][0], size))
        exchange_files(outgoing, incoming, None, self._device)

    def _verify(self, manifest: Manifest, wanted: Sequence[int]) -> None:
        """Read this rank's share of what its node needs; raises CheckpointError that names what is
        damaged."""
        ranks = self._place.nodes[self._node]
        mine = wanted[ranks.index(self._ranks.rank) :: len(ranks)]
        faults = verify_shards(self._place.folder, [manifest.shards[shard] for shard in mine])
        if faults:
            raise CheckpointError(faults[0].message, where=faults[0].where)

    def _together(self, work: Callable[[], object]) -> Sequence[str]:
        def told() -> str:
            value = work()
            return value if isinstance(value, str) else ""

        return try_together(self._ranks, f"restoring {self._place.folder.name} from memory", told)
