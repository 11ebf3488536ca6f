"""Random faults on SSH nodes: they are cut off, die and come back, the shared storage is full, processes are
killed and stopped; the run steps down the ladder and up again, and ends with an undisturbed one's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support import chaos, ssh_runs
from tests.support.beds import SshBeds
from tests.support.chaos_ground import SshGround, storage
from tests.support.chaos_play import Reference, play_and_check
from tests.support.chaos_stand_in import interpreter

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def ground() -> Iterator[SshGround]:
    """Three nodes that share a small file system."""
    with ExitStack() as stack:
        folder = stack.enter_context(storage())
        bed = SshBeds(stack).nodes(3)
        (folder / ".ssh").mkdir(mode=0o700)
        (folder / ".ssh" / "config").write_text(bed.ssh_config.read_text())
        profile = folder / "bed.yaml"
        ssh_runs.write_profile(profile, bed, nodes=3, python=interpreter(folder))
        yield SshGround(folder=folder, home=folder, options=("--cluster", str(profile)), bed=bed)


@pytest.fixture(scope="module")
def reference(ground: SshGround) -> Reference:
    return Reference(ground)


@pytest.mark.parametrize("seed", chaos.seeds_of("ssh"))
def test_chaos(seed: int, ground: SshGround, reference: Reference) -> None:
    play_and_check(ground, chaos.draw(seed), reference)
