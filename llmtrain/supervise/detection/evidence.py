"""From what agents see of their ranks to the ranks that the others wait for. Pure.

All ranks of a hanging training are silent alike. Who is to blame follows from two things: who has not entered
a collective that other members of its group have entered, and who does not wait for anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.run.flight import FlightView, LaneView

STOPPED, UNINTERRUPTIBLE, RUNNING = "Tt", "D", "R"
NAMED = 8
"""Most ranks that a sentence names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """One rank, as its node's agent sees it from outside."""

    rank: int
    pid: int
    state: str = ""
    """Letter of /proc/PID/stat; empty when it is gone."""
    sleeps_in: str = ""
    """Kernel function."""
    flight: FlightView | None = None
    """None for a rank without a recorder."""

    @property
    def waits(self) -> bool:
        """Whether it stands still for other ranks."""
        flight = self.flight
        return flight is not None and (not flight.doing or any(lane.waits for lane in flight.lanes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The newest collective of a group that not all members have entered."""

    axis: str
    operation: str
    number: int
    entered: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """The ranks that the others wait for, and the sentence that says why."""

    ranks: tuple[int, ...]
    reason: str
    is_busy: bool = False
    """Whether all of them compute, or wait for storage: then they may only be slow, and a restart would be
    no faster."""


def parse_evidence(raw: Mapping[str, Any]) -> RankEvidence | None:
    """One record of `messages.Seen`; None for one of another version."""
    try:
        flight = raw.get("flight")
        view = None
        if flight is not None:
            lanes = tuple(LaneView(**lane) for lane in flight["lanes"])
            view = FlightView(**{**flight, "lanes": lanes})
        known = {name: raw[name] for name in ("rank", "pid", "state", "sleeps_in")}
        return RankEvidence(**known, flight=view)
    except (TypeError, KeyError, ValueError):
        return None


def open_collectives(evidence: Sequence[RankEvidence]) -> list[Collective]:
    """Collectives that some members of a group have entered and others have not, the widest group first."""
    groups: dict[tuple[str, int], list[tuple[int, LaneView]]] = {}
    for each in evidence:
        for lane in each.flight.lanes if each.flight else ():
            groups.setdefault((lane.axis, lane.group), []).append((each.rank, lane))
    found = []
    for (axis, _), members in groups.items():
        newest = max(lane.entered for _, lane in members)
        operation = next(lane.operation for _, lane in members if lane.entered == newest)
        missing = tuple(rank for rank, lane in members if lane.entered < newest)
        if missing:
            entered = tuple(rank for rank, lane in members if lane.entered == newest)
            found.append(
                Collective(axis=axis, operation=operation, number=newest, entered=entered, missing=missing)
            )
    return sorted(found, key=lambda each: -len(each.entered) - len(each.missing))


def blame(evidence: Sequence[RankEvidence]) -> Blame | None:
    """Who holds the others up; None when nothing is seen that tells."""
    for rule in (_stopped, _uninterruptible, _late_and_free, _free, _late):
        if found := rule(evidence):
            return found
    return None


def _stopped(evidence: Sequence[RankEvidence]) -> Blame | None:
    found = [each for each in evidence if each.state and each.state in STOPPED]
    if not found:
        return None
    return _blame(found, f"{_are(found)} stopped by a signal or a debugger", evidence)


def _uninterruptible(evidence: Sequence[RankEvidence]) -> Blame | None:
    found = [each for each in evidence if each.state == UNINTERRUPTIBLE and not each.waits]
    if not found:
        return None
    place = found[0].sleeps_in
    where = f" in {place}" if place and place != "0" else ""
    return _blame(found, f"{_are(found)} in uninterruptible sleep{where}: storage or a driver", evidence)


def _late_and_free(evidence: Sequence[RankEvidence]) -> Blame | None:
    late = {rank for each in open_collectives(evidence) for rank in each.missing}
    found = [each for each in evidence if each.rank in late and each.flight and not each.waits]
    return _blame(found, _doing(found), evidence) if found else None


def _free(evidence: Sequence[RankEvidence]) -> Blame | None:
    """In a pipeline, ranks wait for neighbours without a collective."""
    found = [each for each in evidence if each.flight and not each.waits]
    return _blame(found, _doing(found), evidence) if found and len(found) < len(evidence) else None


def _late(evidence: Sequence[RankEvidence]) -> Blame | None:
    late = {rank for each in open_collectives(evidence) for rank in each.missing}
    found = [each for each in evidence if each.rank in late]
    return _blame(found, f"{_are(found)} waiting for others, too", evidence) if found else None


def _blame(found: Sequence[RankEvidence], why: str, evidence: Sequence[RankEvidence]) -> Blame:
    ranks = tuple(each.rank for each in found)
    missed = next(
        (each for each in open_collectives(evidence) if set(each.missing) & set(ranks) and each.entered), None
    )
    tail = ""
    if missed is not None:
        tail = (
            f"; {count_ranks(missed.entered)} entered {missed.operation} {missed.number} of group "
            f"{missed.axis}, {name_ranks(missed.missing)} did not"
        )
    busy = all(each.state in (RUNNING, UNINTERRUPTIBLE) for each in found)
    return Blame(ranks=ranks, reason=f"{name_ranks(ranks)} {why}{tail}", is_busy=busy)


def _doing(found: Sequence[RankEvidence]) -> str:
    words = sorted({each.flight.doing for each in found if each.flight and each.flight.doing})
    steps = sorted({each.flight.step for each in found if each.flight})
    verb = "is" if len(found) == 1 else "are"
    doing = f"at `{'`, `'.join(words[:3])}`" if words else "between two passes"
    return f"{verb} {doing} of step {steps[0]}"


def _are(found: Sequence[RankEvidence]) -> str:
    return "is" if len(found) == 1 else "are"


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 1, 2 and 5`, `ranks 0, 1, ... (64 ranks)`."""
    names = [str(rank) for rank in ranks[:NAMED]]
    if len(ranks) == 1:
        return f"rank {names[0]}"
    if len(ranks) > NAMED:
        return f"ranks {', '.join(names)}, ... ({len(ranks)} ranks)"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def count_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `7 ranks`."""
    return name_ranks(ranks) if len(ranks) == 1 else f"{len(ranks)} ranks"


def collective_table(evidence: Sequence[RankEvidence]) -> Iterator[str]:
    """Lines for a person: every group's newest collective, who entered it and who did not."""
    for each in open_collectives(evidence):
        yield (
            f"{each.axis}: {each.operation} {each.number}: entered by {name_ranks(each.entered)}, "
            f"not by {name_ranks(each.missing)}"
        )
