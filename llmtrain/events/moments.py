"""Which events are worth a sentence to a person, and the sentence."""

from __future__ import annotations

from typing import get_args

from llmtrain.events.event import Event
from llmtrain.events.reaction_words import reaction_sentence
from llmtrain.events.records import Moment
from llmtrain.events.saving import SaveIntervalSet, interval_text, source_text
from llmtrain.events.schema import (
    AttemptEnded,
    AttemptStarted,
    CheckpointFailed,
    CheckpointSkipped,
    Decided,
    EventsDropped,
    Found,
    Notice,
    RankFailed,
    Restored,
    RunEnded,
)
from llmtrain.events.watching import NodeChanged, SlowRank
from llmtrain.events.words import Level, NodeStatus

TEXT_LIMIT = 500
NODE_WORDS: dict[NodeStatus, str] = {
    NodeStatus.HEALTHY: "back",
    NodeStatus.QUARANTINED: "in quarantine",
}


def describe(event: Event) -> Moment | None:
    """The sentence for an event, or None for routine ones (steps, phases, samples, commits) and
    for decisions that the run's end tells again."""
    found = _sentence(event)
    if found is None:
        return None
    level, text = found
    short = text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 3] + "..."
    return Moment(
        time=event.time,
        attempt=event.attempt,
        level=level,
        text=short,
        source=event.source,
        rank=event.rank,
    )


def _sentence(event: Event) -> tuple[Level, str] | None:
    match event.payload:
        case SlowRank(rank=rank, node=node, excess=excess, peers=peers, confirmed=confirmed):
            others = "its peer" if peers == 1 else f"{peers} peers"
            slow = "has been slow for minutes" if confirmed else "is slow"
            return "warning", f"rank {rank} on {node} {slow}: it computes {excess:.1%} longer than {others}"
        case Found(message=message):
            return "warning", message
        case Decided(action="restart"):
            return "info", "the next attempt follows"
        case RankFailed(error=error, error_class=error_class):
            return "error", f"rank {event.rank} failed ({error_class}): {error}"
        case CheckpointFailed(step=step, error=error):
            return "error", f"checkpoint at step {step} failed: {error}"
        case CheckpointSkipped(step=step, reason=reason):
            return "warning", f"no checkpoint at step {step}: {reason}"
        case _:
            return _course_sentence(event) or _plain_sentence(event) or reaction_sentence(event.payload)


def _course_sentence(event: Event) -> tuple[Level, str] | None:
    match event.payload:
        case AttemptStarted(world_size=world_size, nodes=nodes, membership=membership):
            where = f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
            return "info", f"attempt {event.attempt} starts {world_size} ranks{where}{_because(membership)}"
        case Restored(step=0, checkpoint=None, reason=reason):
            return "info", f"starts from the seed{_because(reason)}"
        case Restored(step=step, checkpoint=checkpoint, reason=reason):
            return "info", f"restored {checkpoint or 'weights'} (step {step}){_because(reason)}"
        case AttemptEnded(outcome=outcome, cause=cause):
            return ("warning" if outcome == "failed" else "info"), f"attempt {event.attempt} {outcome}" + (
                f": {cause}" if cause else ""
            )
        case RunEnded(exit_status=exit_status, message=message):
            return ("info" if exit_status in (0, 75) else "error"), message
        case _:
            return None


def _plain_sentence(event: Event) -> tuple[Level, str] | None:
    match event.payload:
        case Notice(message=message, level=level):
            return (level if level in get_args(Level) else "info"), message
        case NodeChanged(node=node, state=state, reason=reason):
            is_fit = state in (NodeStatus.HEALTHY, NodeStatus.SPARE)
            return (
                "info" if is_fit else "warning"
            ), f"node {node} is {NODE_WORDS.get(state, state)}{_because(reason)}"
        case SaveIntervalSet(source="expected" | "measured") as told:
            why = source_text(told.source, told.stall_seconds, told.between_failures)
            return "info", f"checkpoints {interval_text(told.every_steps, told.seconds)}: {why}"
        case EventsDropped(count=count, reason=reason):
            return "warning", f"{count} events of {event.source} are missing: {reason}"
        case _:
            return None


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
