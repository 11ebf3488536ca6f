"""Random faults, several in one run: it ends with the very weights of an undisturbed one, every sample is
proven to be consumed exactly once, and nothing is left running.

The seeds are shared out over this machine, SSH nodes (`ssh/test_ssh_chaos.py`) and a SLURM cluster
(`slurm/test_slurm_chaos.py`). `LLMTRAIN_CHAOS_SEEDS=200` plays so many; `LLMTRAIN_CHAOS_SEED=17` that one.
"""

from __future__ import annotations

import pytest

from tests.support import chaos
from tests.support.chaos_ground import Ground
from tests.support.chaos_play import Reference, play_and_check
from tests.support.chaos_stand_in import IS_WANTED, interpreter

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """One storage folder for all, so that they share the corpus."""
    folder = tmp_path_factory.mktemp("chaos")
    python = ("--set", f"cluster.backend.python={interpreter(folder)}") if IS_WANTED else ()
    return Ground(folder=folder, home=folder, options=python)


@pytest.fixture(scope="module")
def reference(ground: Ground) -> Reference:
    return Reference(ground)


@pytest.mark.parametrize("seed", chaos.seeds_of("local"))
def test_chaos(seed: int, ground: Ground, reference: Reference) -> None:
    case = chaos.draw(seed)
    if IS_WANTED and any(fault.kind in chaos.BY_RECIPE for fault in case.faults):
        pytest.skip("a stand-in knows nothing of faults that the recipe injects")
    play_and_check(ground, case, reference)


def test_faults_are_drawn_from_the_seed() -> None:
    for seed in range(200):
        faults = chaos.draw(seed).faults
        assert faults == chaos.draw(seed).faults
        assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)
        assert all(0 < fault.step < chaos.STEPS for fault in faults)
        assert sum(fault.kind in chaos.LOSES_A_NODE for fault in faults) <= chaos.LOSABLE


@pytest.mark.parametrize("backend", chaos.KINDS)
def test_every_kind_of_a_backend_is_drawn_soon(backend: str) -> None:
    cases = [case for seed in range(100) if (case := chaos.draw(seed)).backend == backend]
    assert {fault.kind for case in cases for fault in case.faults[:2]} == set(chaos.KINDS[backend])
