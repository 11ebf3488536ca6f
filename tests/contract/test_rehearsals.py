"""`launch --rehearse` on every backend: real sshd, a real SLURM cluster. Minutes long: by hand."""

from __future__ import annotations

import json
import os

from tests.support.contract import Place

NAMES = os.environ.get("LLMTRAIN_REHEARSE", "")
LEFT_OUT = {"local": set(), "ssh": set(), "slurm": {"lost-node", "returned-node"}}

if NAMES:

    def test_what_can_be_rehearsed_recovers(place: Place) -> None:
        where = ("--cluster", place.profile, "--set", f"cluster.storage.path={place.folder}/runs")
        out, _ = place.command("launch", "tiny", "--rehearse", NAMES, *where, "--json", seconds=2400)
        told = json.loads(out)["scenarios"]
        assert {each["name"] for each in told if each["skipped"]} <= LEFT_OUT[place.kind]
        for each in told:
            assert each["recovered"] or each["skipped"], each
        left = [path.name for path in (place.folder / "runs").iterdir()]
        assert left == [".corpora"], "what went well is cleared away, and says nothing of nodes"
        assert place.bed is None or not any(
            place.bed.processes(name, "rehearsal-") for name in place.bed.names
        )
