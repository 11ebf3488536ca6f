"""Random faults on a SLURM cluster: nodes are taken away or die, jobs are cancelled, killed and queued again,
the controller is away; the run ends with the weights of an undisturbed one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.slurm.conftest import PROFILE
from tests.support import chaos
from tests.support.chaos_ground import SlurmGround, storage
from tests.support.chaos_play import Reference, play_and_check
from tests.support.chaos_stand_in import interpreter
from tests.support.slurm_beds import start_slurm_bed

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def ground() -> Iterator[SlurmGround]:
    """Runs of three nodes, and a fourth for jobs that are queued again."""
    with ExitStack() as stack:
        folder = stack.enter_context(storage())
        bed = start_slurm_bed(stack)
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("SLURM_CONF", str(bed.conf))
        profile = folder / "bed.yaml"
        text = PROFILE.format(storage=folder / "runs").replace("nodes: 4", "nodes: 3")
        profile.write_text(text.replace("kind: slurm,", f"kind: slurm, python: {interpreter(folder)},"))
        yield SlurmGround(folder=folder, home=folder, options=("--cluster", str(profile)), bed=bed)


@pytest.fixture(scope="module")
def reference(ground: SlurmGround) -> Reference:
    return Reference(ground)


@pytest.mark.parametrize("seed", chaos.seeds_of("slurm"))
def test_chaos(seed: int, ground: SlurmGround, reference: Reference) -> None:
    try:
        play_and_check(ground, chaos.draw(seed), reference)
    finally:
        ground.slurm.restore()
