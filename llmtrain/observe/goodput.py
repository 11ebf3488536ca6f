"""Where the run's time went: the share that moved training forward, and what the rest was spent on.

All seconds are wall time from the first attempt's start to now (or to the end of the last attempt). Lost
steps are those that a later attempt had to do again because it restored an older step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from llmtrain.events.records import AttemptState
from llmtrain.events.words import EndCause
from llmtrain.observe.run_reader import RunView

CostCause = Literal[EndCause, "unknown"]

PARTS = (
    "productive",
    "slow",
    "lost",
    "start",
    "load",
    "checkpoint",
    "evaluation",
    "detect",
    "tear_down",
    "down",
)
"""Known parts of a run's time, in the order in which they are shown; `other` is the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Seconds by what they were spent on; they sum to `total`. `estimated` when not every event was read."""

    total: float = 0.0
    productive: float = 0.0
    """Steps that count, at the pace of the planned layout."""
    slow: float = 0.0
    """What steps that count took beyond that pace, on a lower rung of the ladder."""
    lost: float = 0.0
    """Steps that had to be done again."""
    start: float = 0.0
    """From an attempt's start to the beginning of its first step, without loading."""
    load: float = 0.0
    """Restoring a checkpoint."""
    checkpoint: float = 0.0
    """Waiting for saves."""
    evaluation: float = 0.0
    detect: float = 0.0
    """From a failed attempt's last step to the first finding."""
    tear_down: float = 0.0
    """From there to the end of the attempt, when nothing of it ran any more."""
    down: float = 0.0
    """Between attempts."""
    estimated: bool = False
    gpu_hours: float = 0.0
    """Accelerators (ranks) of the attempts, times the hours that they were held."""
    productive_gpu_hours: float = 0.0
    """The share of these that went into steps that count."""

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
        return [(name, getattr(self, name)) for name in PARTS]

    def document(self) -> dict[str, Any]:
        """JSON form: seconds by part, the ratio, and whether they are estimates."""
        parts = {f"{name}_seconds": seconds for name, seconds in self.parts()}
        return {
            "ratio": self.ratio,
            "total_seconds": self.total,
            **parts,
            "gpu_hours": self.gpu_hours,
            "productive_gpu_hours": self.productive_gpu_hours,
            "estimated": self.estimated,
        }


def goodput(view: RunView) -> Goodput:
    """The split of a run's time so far.

    Each attempt's time is shared out from its two ends, so that the parts sum to the elapsed time whatever
    the events say: what clocks of different machines claim beyond it is cut off.
    """
    attempts = [attempt for attempt in view.state.attempts if attempt.started is not None]
    if not attempts:
        return Goodput(estimated=not view.complete)
    begin = clock = attempts[0].started or 0.0
    spent = dict.fromkeys(PARTS, 0.0)
    rank_seconds = productive = 0.0
    planned = _planned_pace(attempts)
    for attempt in attempts:
        started = max(clock, attempt.started or 0.0)
        spent["down"] += started - clock
        clock = max(started, _end(attempt, view))
        lost = lost_steps_of(attempt, view.state.attempts)
        parts = _split(attempt, clock - started, lost, planned)
        for name, seconds in parts.items():
            spent[name] += seconds
        rank_seconds += (clock - started) * attempt.world_size
        productive += parts["productive"] * attempt.world_size
    return Goodput(
        total=clock - begin,
        **spent,
        estimated=not view.complete,
        gpu_hours=rank_seconds / 3600.0,
        productive_gpu_hours=productive / 3600.0,
    )


def _planned_pace(attempts: Sequence[AttemptState]) -> float:
    """Seconds of a step in the planned layout; 0 when no attempt ran it."""
    whole = [attempt for attempt in attempts if not attempt.rung]
    seen = sum(attempt.steps_seen for attempt in whole)
    return sum(attempt.step_seconds for attempt in whole) / seen if seen else 0.0


def _split(attempt: AttemptState, seconds: float, lost_steps: int, planned: float) -> dict[str, float]:
    """What an attempt of so many seconds spent them on, as far as its events tell; at most all of them."""
    end = (attempt.started or 0.0) + seconds
    notice = min(seconds, _notice_seconds(attempt))
    detect = min(notice, max(0.0, (attempt.found_time or end) - (attempt.last_step_time or end)))
    start = min(seconds - notice, _start_seconds(attempt, end))
    load = min(start, attempt.load_seconds)
    mean = attempt.mean_step_seconds
    kept = (attempt.steps - lost_steps) * mean
    slow = (attempt.steps - lost_steps) * max(0.0, mean - planned) if attempt.rung and planned else 0.0
    room = max(0.0, seconds - notice - start)
    steps = _fitting(room, productive=kept - slow, slow=slow, lost=lost_steps * mean)
    room = max(0.0, room - sum(steps.values()))
    between = {"checkpoint": attempt.checkpoint_seconds, "evaluation": attempt.evaluation_seconds}
    return {
        "start": start - load,
        "load": load,
        **steps,
        **_fitting(room, **between),
        "detect": detect,
        "tear_down": notice - detect,
    }


def _fitting(room: float, **wanted: float) -> dict[str, float]:
    """The wanted seconds, all shortened alike where they are more than there is room for."""
    real = {name: value if 0.0 <= value < inf else 0.0 for name, value in wanted.items()}
    total = sum(real.values())
    share = min(1.0, room / total) if total > 0 else 0.0
    return {name: value * share for name, value in real.items()}


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
    cause: CostCause
    """Kind of the finding that ended it; `stop` when a person or the scheduler did."""
    steps: float = 0.0
    """Steps done again."""
    notice: float = 0.0
    """From the last step to the end of the attempt: noticing and tearing down."""
    down: float = 0.0
    """Until the next attempt began."""
    start: float = 0.0
    """Until its first step began."""
    ranks: int = 0
    """Accelerators of the attempt."""

    @property
    def gpu_hours(self) -> float:
        """The same in hours of accelerators."""
        return self.total * self.ranks / 3600.0

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
                ranks=before.world_size,
                cause=_cause_of(before, after),
                steps=lost_steps_of(before, view.state.attempts) * before.mean_step_seconds,
                notice=_notice_seconds(before),
                down=max(0.0, begun - end),
                start=0.0 if after is None or is_open else _start_seconds(after, _end(after, view)),
            )
        )
    return found


def costs_by_cause(view: RunView) -> dict[str, float]:
    """Seconds that each kind of cause has cost the run, most first."""
    sums: dict[str, float] = {}
    for cost in costs(view):
        sums[cost.cause] = sums.get(cost.cause, 0.0) + cost.total
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _cause_of(before: AttemptState, after: AttemptState | None) -> CostCause:
    if before.outcome == "stopped" and after is not None and after.reason not in ("resume", "first"):
        return "step_up"
    return before.finding or ("stop" if before.outcome == "stopped" else "unknown")


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
