"""Events for tests: one valid payload of every kind, hypothesis strategies, and whole invented runs."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from hypothesis import strategies as st

from llmtrain.events import schema
from llmtrain.events.event import Event, payload_classes
from llmtrain.events.schema import Payload

START = 1_800_000_000.0


def event(
    payload: Payload,
    *,
    time: float = START,
    attempt: int = 1,
    rank: int | None = None,
    seq: int = 0,
    source: str = "",
) -> Event:
    """An event of run `run`, by a rank when one is given, else by the supervisor."""
    source = source or ("supervisor" if rank is None else "rank")
    return Event(time=time, run="run", attempt=attempt, source=source, rank=rank, seq=seq, payload=payload)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """JSON values of an annotated type; of words, also those of another version."""
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(-(2**62), 2**62)
    if hint is float:
        return st.floats(allow_nan=False)
    if hint is str:
        return st.text(max_size=20)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint) | st.text(max_size=20)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(arguments) | st.text(max_size=20)
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=4).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3)
    return st.none() | values_of(next(inner for inner in arguments if inner is not type(None)))


def payloads() -> st.SearchStrategy[Payload]:
    """Any payload of any kind, with wild values."""
    return st.one_of([_payloads_of(cls) for cls in payload_classes().values()])


def _payloads_of(cls: type[Payload]) -> st.SearchStrategy[Payload]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{field.name: values_of(hints[field.name]) for field in dataclasses.fields(cls)})


def events() -> st.SearchStrategy[Event]:
    """Any event of a few attempts and ranks."""
    return st.builds(
        Event,
        time=st.floats(START, START + 1000),
        run=st.just("run"),
        attempt=st.integers(0, 4),
        source=st.sampled_from(["rank", "agent", "supervisor"]),
        rank=st.none() | st.integers(0, 3),
        seq=st.integers(0, 100),
        payload=payloads(),
    )


def step_finished(step: int, *, loss: float | None = None, seconds: float = 0.5) -> schema.StepFinished:
    """A plausible step."""
    return schema.StepFinished(
        step=step,
        loss=5.5 / step**0.2 if loss is None else loss,
        grad_norm=1.0,
        learning_rate=1e-3,
        seconds=seconds,
        tokens=2048,
        tokens_per_second=2048 / seconds,
        first_sample=8 * (step - 1),
        samples=8,
    )


def attempt_files(
    number: int, *, restored: int, steps: int, world_size: int = 4, start: float = START, outcome: str = ""
) -> dict[str, list[Event]]:
    """One attempt as the files that it would leave: file name -> events in order. A step takes half a second;
    every fifth one is validated and saved."""
    supervisor = [
        event(
            schema.AttemptStarted(
                world_size=world_size,
                nodes=("localhost",),
                layout={"dp": world_size, "tp": 1, "pp": 1},
                reason="first" if number == 1 else "rank 1 died with signal 9",
            ),
            time=start,
            attempt=number,
        )
    ]
    files = {"supervisor.jsonl": supervisor}
    for rank in range(world_size):
        files[f"rank-{rank:05d}.jsonl"] = list(_rank_events(number, rank, restored, steps, start))
    end = start + 2 + (steps + 1) * 0.5
    if outcome:
        died = "rank 1 died with signal 9"
        failed = outcome == "failed"
        if failed:
            found = schema.Found(finding="rank_dead", message=died, rank=1, node=0)
            supervisor.append(event(found, time=end, attempt=number))
        ended = schema.AttemptEnded(outcome=outcome, cause=died if failed else "", seconds=end - start)
        supervisor.append(event(ended, time=end + 0.1, attempt=number))
        if failed:
            decided = schema.Decided(action="restart", reason=died)
            supervisor.append(event(decided, time=end + 0.1, attempt=number))
    return files


def _rank_events(number: int, rank: int, restored: int, steps: int, start: float) -> Iterator[Event]:
    at = start + 1 + rank / 1000
    yield event(
        schema.RankStarted(host="localhost", pid=1000 * number + rank, local_rank=rank),
        time=at,
        attempt=number,
        rank=rank,
    )
    if rank == 0:
        name = f"step-{restored:08d}" if restored else None
        yield event(schema.Restored(step=restored, checkpoint=name), time=at + 0.5, attempt=number, rank=0)
    for step in range(restored + 1, restored + steps + 1):
        at = start + 2 + (step - restored) * 0.5 + rank / 1000
        yield event(schema.PhaseStarted(phase="step", step=step), time=at - 0.5, attempt=number, rank=rank)
        if rank == 0:
            yield event(step_finished(step), time=at, attempt=number, rank=0)
        own = schema.RankStep(step=step, seconds=0.5, compute_seconds=0.4, memory_bytes=2**30)
        yield event(own, time=at, attempt=number, rank=rank)
        if rank == 0 and step % 5 == 0:
            evaluated = schema.Evaluated(step=step, loss=3.0, seconds=0.01)
            yield event(evaluated, time=at, attempt=number, rank=0)
            saved = schema.CheckpointCommitted(step=step, name=f"step-{step:08d}", bytes=1000, seconds=0.01)
            yield event(saved, time=at, attempt=number, rank=0)
