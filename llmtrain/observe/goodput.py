"""Where the run's time went: the share that moved training forward, and what the rest was spent on.

All seconds are wall time from the first attempt's start to now (or to the end of the last attempt). Lost
steps are those that a later attempt had to do again because it restored an older step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from llmtrain.events.records import AttemptState
from llmtrain.observe.run_reader import RunView


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Seconds by what they were spent on; `estimated` when not every event was read."""

    total: float = 0.0
    productive: float = 0.0
    """Steps that count."""
    lost: float = 0.0
    """Steps that had to be done again."""
    start: float = 0.0
    """From an attempt's start to the beginning of its first step."""
    checkpoint: float = 0.0
    evaluation: float = 0.0
    notice: float = 0.0
    """From a failed attempt's last step to its end: noticing what is wrong, and tearing down."""
    down: float = 0.0
    """Between attempts."""
    estimated: bool = False

    @property
    def other(self) -> float:
        """The rest: waiting between steps."""
        return max(0.0, self.total - sum(seconds for _, seconds in self._known()))

    @property
    def ratio(self) -> float | None:
        """Productive share, 0..1; None before the first attempt."""
        return min(1.0, self.productive / self.total) if self.total > 0 else None

    def parts(self) -> list[tuple[str, float]]:
        """Name and seconds of every part, in a fixed order."""
        return [*self._known(), ("other", self.other)]

    def _known(self) -> list[tuple[str, float]]:
        return [
            ("productive", self.productive),
            ("lost", self.lost),
            ("start", self.start),
            ("checkpoint", self.checkpoint),
            ("evaluation", self.evaluation),
            ("notice", self.notice),
            ("down", self.down),
        ]

    def document(self) -> dict[str, Any]:
        """JSON form: seconds by part, the ratio, and whether they are estimates."""
        parts = {f"{name}_seconds": seconds for name, seconds in self.parts()}
        return {
            "ratio": self.ratio,
            "total_seconds": self.total,
            **parts,
            "estimated": self.estimated,
        }


def goodput(view: RunView) -> Goodput:
    """The split of a run's time so far."""
    attempts = [attempt for attempt in view.state.attempts if attempt.started is not None]
    if not attempts:
        return Goodput(estimated=not view.complete)
    begin = attempts[0].started or 0.0
    productive = lost = start = checkpoint = evaluation = notice = down = 0.0
    for attempt in attempts:
        lost_steps = lost_steps_of(attempt, view.state.attempts)
        productive += (attempt.steps - lost_steps) * attempt.mean_step_seconds
        lost += lost_steps * attempt.mean_step_seconds
        start += _start_seconds(attempt, _end(attempt, view))
        checkpoint += attempt.checkpoint_seconds
        evaluation += attempt.evaluation_seconds
        notice += _notice_seconds(attempt)
    for before, after in pairwise(attempts):
        down += max(0.0, (after.started or 0.0) - _end(before, view))
    return Goodput(
        total=max(0.0, _end(attempts[-1], view) - begin),
        productive=productive,
        lost=lost,
        start=start,
        checkpoint=checkpoint,
        evaluation=evaluation,
        notice=notice,
        down=down,
        estimated=not view.complete,
    )


def lost_steps_of(attempt: AttemptState, attempts: tuple[AttemptState, ...]) -> int:
    """Steps of an attempt that a later one took back by restoring an older state."""
    if attempt.last_step is None or attempt.first_step is None:
        return 0
    restored = [
        later.restored_step
        for later in attempts
        if later.number > attempt.number and later.restored_step is not None
    ]
    kept = min([attempt.last_step, *restored])
    return min(attempt.steps, attempt.last_step - kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the end of one attempt cost the run, in seconds of wall time, and why it came."""

    attempt: int
    cause: str
    """Kind of the finding that ended it; `stop` when a person or the scheduler did."""
    steps: float = 0.0
    """Steps done again."""
    notice: float = 0.0
    """From the last step to the end of the attempt: noticing and tearing down."""
    down: float = 0.0
    """Until the next attempt began."""
    start: float = 0.0
    """Until its first step began."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.steps + self.notice + self.down + self.start


def costs(view: RunView, *, settled: bool = False) -> list[Cost]:
    """The price of every attempt that did not bring the run to its end, in order; the newest one's grows
    until the next attempt trains. With `settled` a start counts when it is over, so that no part ever
    shrinks."""
    attempts = [attempt for attempt in view.state.attempts if attempt.started is not None]
    found = []
    for before, after in zip(attempts, [*attempts[1:], None], strict=False):
        if before.outcome not in ("failed", "stopped") and after is None:
            continue
        if after is None and view.state.ended:
            continue
        end = _end(before, view)
        begun = view.now if after is None else after.started or end
        is_open = settled and after is not None and after.first_step_time is None
        found.append(
            Cost(
                attempt=before.number,
                cause=before.finding or ("stop" if before.outcome == "stopped" else "unknown"),
                steps=lost_steps_of(before, view.state.attempts) * before.mean_step_seconds,
                notice=_notice_seconds(before),
                down=max(0.0, begun - end),
                start=0.0 if after is None or is_open else _start_seconds(after, _end(after, view)),
            )
        )
    return found


def _notice_seconds(attempt: AttemptState) -> float:
    if attempt.outcome != "failed" or attempt.last_step_time is None or attempt.ended is None:
        return 0.0
    return max(0.0, attempt.ended - attempt.last_step_time)


def _start_seconds(attempt: AttemptState, end: float) -> float:
    started = attempt.started or 0.0
    if attempt.first_step_time is None:
        return max(0.0, end - started)
    return max(0.0, attempt.first_step_time - attempt.mean_step_seconds - started)


def _end(attempt: AttemptState, view: RunView) -> float:
    """End of an attempt; while it runs, now, or its last step when nobody supervises it any more."""
    if attempt.ended is not None:
        return attempt.ended
    later = [other.started for other in view.state.attempts if other.number > attempt.number]
    last = attempt.last_step_time or attempt.started or 0.0
    if any(start is not None for start in later):
        return last
    return view.now if view.is_supervised else (view.state.last_event or last)
