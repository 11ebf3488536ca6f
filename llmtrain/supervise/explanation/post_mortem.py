"""Everything that explains why an attempt ended, in one file for programs and one for people.

`post_mortem.json` and `post_mortem.txt` lie in the attempt's folder: the verdict, the first failure, what
else was found, every rank as it was seen from outside, stacks in groups, collectives that not all had
entered, the last lines of the failing rank, and the kernel's word.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llmtrain.config.codec import to_json
from llmtrain.events.state import RunState
from llmtrain.events.words import FindingKind
from llmtrain.run.atomic import write_atomic, write_json
from llmtrain.run.layout import AttemptDir
from llmtrain.supervise.detection.detect import Finding, describe_exit
from llmtrain.supervise.detection.evidence import collective_table, name_ranks
from llmtrain.supervise.detection.reports import NodeReport, RankEnd, Reports
from llmtrain.supervise.explanation.causes import CLASSES, Cause, CauseClass, cause_of
from llmtrain.supervise.explanation.stacks import StackGroup, group_stacks, read_stacks

LAST_LINES = 20
LOG_BYTES = 1 << 15
OTHERS = 16
"""Further findings that are listed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankAtTheEnd:
    """One rank when the attempt ended."""

    rank: int
    node: str
    end: str
    """How its process ended before the tear-down; empty while it lived."""
    phase: str
    step: int
    doing: str
    """By its flight recorder; empty when there is none, or when it waited in a pipeline."""
    waits: bool
    """Whether it stood still for other ranks."""
    state: str
    """Letter of /proc/PID/stat."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PostMortem:
    """Why an attempt ended."""

    schema: int = 1
    run: str
    attempt: int
    time: float
    """Epoch seconds."""
    verdict: str
    """The whole story in a sentence or two."""
    cause: CauseClass
    evidence: str
    finding: FindingKind
    """The first one."""
    message: str
    rank: int | None
    node: str
    step: int
    also_found: tuple[str, ...]
    last_lines: tuple[str, ...]
    """Of the failing rank's log, else of its node's."""
    kernel: Mapping[str, tuple[str, ...]]
    """Node -> lines."""
    ranks: tuple[RankAtTheEnd, ...]
    collectives: tuple[str, ...]
    stacks: tuple[StackGroup, ...]


def examine(
    attempt: AttemptDir,
    run_id: str,
    findings: Sequence[Finding],
    reports: Reports,
    state: RunState,
    *,
    on_gpu: bool,
) -> PostMortem:
    """Put together what is known; `findings` has the first failure first. Reads logs and stacks."""
    first = findings[0]
    end = None if first.rank is None else reports.ends.get(first.rank)
    node = first.node if first.node is not None else reports.node_of.get(first.rank or 0)
    report = None if node is None else reports.nodes.get(node)
    lines = _last_lines(attempt, first, node, end)
    cause = _cause(first, end, lines, report, on_gpu=on_gpu)
    evidence = [reports.evidence[rank] for rank in sorted(reports.evidence)]
    return PostMortem(
        run=run_id,
        attempt=attempt.number,
        time=time.time(),
        verdict=_verdict(first, cause, attempt.number),
        cause=cause.kind,
        evidence=cause.evidence,
        finding=first.kind,
        message=first.message,
        rank=first.rank,
        node="" if report is None else report.name,
        step=first.step or _step_of(first, state),
        also_found=tuple(finding.message for finding in findings[1 : 1 + OTHERS]),
        last_lines=lines,
        kernel={each.name: each.kernel for each in reports.nodes.values() if each.kernel},
        ranks=tuple(_ranks(reports, state)),
        collectives=tuple(collective_table(evidence)),
        stacks=tuple(group_stacks(read_stacks(attempt.stacks))),
    )


def _cause(
    first: Finding, end: RankEnd | None, lines: Sequence[str], report: NodeReport | None, *, on_gpu: bool
) -> Cause:
    """The class of the failure; `report` is of the failing rank's node."""
    if report is None:
        return cause_of(first, end, lines, (), 0, on_gpu=on_gpu)
    script = report.script_ended if first.kind == "launcher_failed" else None
    exit_code = None if script is None else script.exit_code
    return cause_of(
        first, end, lines, report.kernel, report.oom_kills, on_gpu=on_gpu, launcher_exit=exit_code
    )


def write_post_mortem(attempt: AttemptDir, found: PostMortem) -> Path:
    """Write both files; the one for people. Raises OSError."""
    write_json(attempt.post_mortem_json, to_json(found))
    write_atomic(attempt.post_mortem_text, "\n".join(as_text(found)) + "\n")
    return attempt.post_mortem_text


def as_text(found: PostMortem) -> Iterator[str]:
    """Lines for a person."""
    yield found.verdict
    yield ""
    yield f"cause      {found.cause}: {CLASSES.get(found.cause, '')}"
    if found.evidence and found.evidence != found.message:
        yield f"evidence   {found.evidence}"
    yield f"found      {found.finding}: {found.message}"
    for title, lines in (
        ("also found", found.also_found),
        ("last lines", found.last_lines),
        *((f"kernel of {node}", lines) for node, lines in found.kernel.items()),
        ("collectives that not all ranks of a group had entered", found.collectives),
        ("ranks", tuple(_rank_lines(found.ranks))),
        ("stacks, innermost frame first", tuple(_stack_lines(found.stacks))),
    ):
        if lines:
            yield ""
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)


def _verdict(first: Finding, cause: Cause, number: int) -> str:
    meaning = CLASSES[cause.kind]
    because = f" ({cause.evidence})" if cause.evidence and cause.evidence not in first.message else ""
    return f"Attempt {number} ended because {meaning}: {first.message}{because}"


def _last_lines(
    attempt: AttemptDir, first: Finding, node: int | None, end: RankEnd | None
) -> tuple[str, ...]:
    if end is not None and end.lines:
        return end.lines[-LAST_LINES:]
    if first.rank is not None and (lines := _tail(attempt.rank_log(first.rank))):
        return lines
    return () if node is None else _tail(attempt.node_log(node))


def _tail(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return tuple(file.read().decode("utf-8", "replace").splitlines()[-LAST_LINES:])
    except OSError:
        return ()


def _step_of(first: Finding, state: RunState) -> int:
    own = None if first.rank is None else state.ranks.get(first.rank)
    return 0 if own is None else own.step


def _ranks(reports: Reports, state: RunState) -> Iterator[RankAtTheEnd]:
    for rank in range(reports.world_size):
        told, seen = state.ranks.get(rank), reports.evidence.get(rank)
        end, node = _own_end(reports, rank), reports.node_of.get(rank)
        flight = None if seen is None else seen.flight
        yield RankAtTheEnd(
            rank=rank,
            node="" if node is None else reports.nodes[node].name,
            end="" if end is None else _end_words(end),
            phase="" if told is None else told.phase,
            step=flight.step if flight is not None and flight.step else (0 if told is None else told.step),
            doing="" if flight is None else flight.doing,
            waits=seen is not None and seen.waits,
            state="" if seen is None else seen.state,
        )


def _own_end(reports: Reports, rank: int) -> RankEnd | None:
    """How a rank ended by itself; None for one that lived until the tear-down killed it."""
    end = reports.ends.get(rank)
    return None if end is None or end.killed else end


def _end_words(end: RankEnd) -> str:
    return "vanished" if end.exit_code is None else describe_exit(end.exit_code)


def _rank_lines(ranks: Sequence[RankAtTheEnd]) -> Iterator[str]:
    """Ranks that were alike share a line."""
    groups: dict[tuple[str, str, int, str], list[int]] = {}
    for each in ranks:
        doing = "waits for others" if each.waits else f"at `{each.doing}`" if each.doing else ""
        state = "stopped" if each.state in ("T", "t") else "uninterruptible" if each.state == "D" else ""
        what = ", ".join(word for word in (each.end, doing, state) if word) or "nothing is known"
        groups.setdefault((each.node, each.phase, each.step, what), []).append(each.rank)
    for (node, phase, step, what), members in groups.items():
        yield f"{name_ranks(members)} on {node or 'no node'}: phase {phase or 'none'}, step {step}, {what}"


def _stack_lines(groups: Sequence[StackGroup]) -> Iterator[str]:
    for group in groups:
        yield f"{name_ranks(group.ranks)}:"
        yield from (f"  {frame}" for frame in group.frames)
