"""How an attempt ended, by what its ranks and node scripts said; `detect` has a table of its own."""

from __future__ import annotations

import pytest

from llmtrain.events import schema
from llmtrain.supervise.detection.detect import detect, ended_well
from tests.supervise.test_detect import LIMITS, Story


@pytest.mark.parametrize(
    ("reasons", "codes", "expected"),
    [
        (("completed",) * 4, (0, 0), "completed"),
        (("stopped",) * 4, (0, 0), "stopped"),
        (("completed",) * 4, (0, 1), None),
        (("completed",) * 4, (0,), None),
        ((), (0, 0), None),
    ],
)
def test_ended_well(reasons: tuple[str, ...], codes: tuple[int, ...], expected: str | None) -> None:
    story = Story().up()
    for rank, reason in enumerate(reasons):
        story.tell(rank, schema.RankFinished(reason=reason, step=9))
    for node, code in enumerate(codes):
        story.script(node, code)
    assert ended_well(story.reports) == expected


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (("completed",) * 4, "completed"),  # asked to leave in the last step's validation
        (("stopped",) * 4, "stopped"),
        (("completed", "completed", "completed"), None),
    ],
)
def test_ranks_whose_torchrun_a_scheduler_killed_end_as_they_say(
    reasons: tuple[str, ...], expected: str | None
) -> None:
    story = Story().up()
    for rank, reason in enumerate(reasons):
        story.tell(rank, schema.RankFinished(reason=reason, step=9))
    for node in range(2):
        story.script(node, 143)
    assert ended_well(story.reports) is None
    assert ended_well(story.reports, stop_wanted=True) == expected


def test_nobody_finished_though_all_left_in_order() -> None:
    """Ranks that wait in standby leave with 0 when their time is up: nothing was trained."""
    story = Story().up()
    for node in range(2):
        story.script(node, 0)
    [finding] = detect(story.state, story.reports, LIMITS, story.now)
    assert finding.kind == "launcher_failed"
    assert "no rank said" in finding.message
