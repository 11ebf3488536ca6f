"""The state of runs as Prometheus metrics: names in base units, labels of bounded number. Pure.

`docs` of a metric is its HELP text. Gauges that follow the weights (step, loss) may go back after a restart;
counters only count what was done, so they never do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from llmtrain.events.records import AttemptState, RunStatus
from llmtrain.observe.goodput import costs, goodput, lost_steps_of
from llmtrain.observe.members import known_ranks, node_counts, node_of, rank_scores, rank_word
from llmtrain.observe.run_reader import RunView

MOST_RANKS = 1024
"""Worlds up to this size get metrics for every rank; bigger ones for every node only."""


@dataclass(slots=True)
class Families:
    """Metric families under construction, in order of first use."""

    known: dict[str, Metric] = field(default_factory=dict)

    def gauge(self, name: str, docs: str, value: float | None, **labels: str) -> None:
        """One sample of a gauge; None is left out."""
        if value is not None:
            family = self.known.setdefault(
                name, GaugeMetricFamily(f"llmtrain_{name}", docs, labels=tuple(labels))
            )
            family.add_metric(tuple(labels.values()), float(value))  # type: ignore[attr-defined]

    def counter(self, name: str, docs: str, value: float, **labels: str) -> None:
        """One sample of a counter; `_total` is added to the name."""
        family = self.known.setdefault(
            name, CounterMetricFamily(f"llmtrain_{name}", docs, labels=tuple(labels))
        )
        family.add_metric(tuple(labels.values()), float(value))  # type: ignore[attr-defined]


def families(views: Iterable[RunView]) -> Iterator[Metric]:
    """All metric families of the runs."""
    into = Families()
    for view in views:
        _run(into, view)
        _training(into, view)
        _time(into, view)
        _checkpoint(into, view)
        _members(into, view)
        _ranks(into, view)
    yield from into.known.values()


def _run(into: Families, view: RunView) -> None:
    run, state = view.run.run_id, view.state
    into.gauge("run_info", "What the run is", 1, run=run, recipe=view.job.recipe, cluster=view.job.cluster)
    for word in RunStatus:
        into.gauge(
            "run_state", "1 for the state that the run is in", view.status == word, run=run, state=word
        )
    into.gauge("supervised", "1 while a live supervisor holds the run", view.is_supervised, run=run)
    into.gauge("attempt", "Number of the newest attempt", state.attempt, run=run)
    _restarts(into, view)
    into.counter("events_dropped", "Events that could not be written", state.events_dropped, run=run)
    into.gauge("last_event_timestamp_seconds", "Time of the newest event", state.last_event, run=run)
    if state.ended:
        into.gauge("exit_status", "Exit code of a run that ended", state.ended.exit_status, run=run)


def _restarts(into: Families, view: RunView) -> None:
    """Restarts by the finding that made them needed and by what they changed. The sample `none` is always
    there, so that a run without restarts has a value."""
    run, attempts = view.run.run_id, view.state.attempts
    counts = Counter({("none", "none"): 0})
    counts.update((before.finding or "stop", _level(before, after)) for before, after in pairwise(attempts))
    for (finding, level), count in sorted(counts.items()):
        labels = {"class": finding, "level": level}
        into.counter("restarts", "Attempts after the first", count, run=run, **labels)
    spent: dict[str, float] = {"none": 0.0}
    for cost in costs(view, settled=True):
        spent[cost.cause] = spent.get(cost.cause, 0.0) + cost.total
    for cause, seconds in sorted(spent.items()):
        docs = "Wall time that ends of attempts cost: steps done again, noticing, waiting, starting"
        into.counter("lost_seconds", docs, seconds, run=run, cause=cause)


def _level(before: AttemptState, after: AttemptState) -> str:
    """What a restart changed: the layout, the nodes, or nothing."""
    if after.layout != before.layout:
        return "layout"
    return "nodes" if after.nodes != before.nodes else "same"


def _training(into: Families, view: RunView) -> None:
    run, state, latest = view.run.run_id, view.state, view.state.latest
    into.gauge("step", "Steps that the current weights contain", state.step, run=run)
    into.gauge("steps", "Steps of the whole run", state.total_steps, run=run)
    executed = sum(attempt.steps for attempt in state.attempts)
    lost = sum(lost_steps_of(attempt, state.attempts) for attempt in state.attempts)
    into.counter("steps_executed", "Steps done, also those done again", executed, run=run)
    tokens = sum(attempt.tokens for attempt in state.attempts)
    into.counter("tokens", "Tokens trained on, also those of steps done again", tokens, run=run)
    into.counter("steps_lost", "Steps that had to be done again", lost, run=run)
    if state.evaluations.last:
        into.gauge("validation_loss", "Last validation loss", state.evaluations.last.loss, run=run)
    if latest is None:
        return
    into.gauge("loss", "Training loss of the last step", latest.loss, run=run)
    into.gauge("gradient_norm", "Global gradient norm before clipping", latest.grad_norm, run=run)
    into.gauge("learning_rate", "Learning rate of the last step", latest.learning_rate, run=run)
    into.gauge("mfu_ratio", "Model FLOPs over peak FLOPs of the last step", latest.mfu, run=run)
    into.gauge("last_step_timestamp_seconds", "End of the last step", latest.time, run=run)
    into.gauge("tokens_per_second", "Tokens a second over recent steps", state.tokens_per_second, run=run)
    into.gauge("step_seconds", "Wall time a step over recent steps", state.seconds_per_step, run=run)
    into.gauge("planned_step_seconds", "What the plan predicted", view.job.planned_step_seconds, run=run)
    into.gauge("eta_seconds", "Time left at the recent pace", state.eta_seconds, run=run)


def _time(into: Families, view: RunView) -> None:
    split = goodput(view)
    if split.ratio is None:
        return
    into.gauge("goodput_ratio", "Share of time in steps that count", split.ratio, run=view.run.run_id)
    for part, seconds in split.parts():
        docs = "Wall time since the first attempt by what it was spent on"
        into.gauge("spent_seconds", docs, seconds, run=view.run.run_id, part=part)


def _checkpoint(into: Families, view: RunView) -> None:
    if not view.state.checkpoints:
        return
    run, last = view.run.run_id, view.state.checkpoints[-1]
    into.gauge("checkpoint_step", "Step of the newest checkpoint that counts", last.step, run=run)
    into.gauge("checkpoint_timestamp_seconds", "Time of its commit", last.time, run=run)
    into.gauge("checkpoint_bytes", "Its size", last.bytes, run=run)
    into.gauge("checkpoint_save_seconds", "Time that saving it took", last.seconds, run=run)
    stall = last.seconds if last.stall_seconds is None else last.stall_seconds
    into.gauge("checkpoint_stall_seconds", "Time that training stood still for it", stall, run=run)


def _members(into: Families, view: RunView) -> None:
    run = view.run.run_id
    ranks = known_ranks(view)
    for word, count in Counter(rank_word(view, rank) for rank in ranks).items():
        into.gauge("ranks", "Ranks of the newest attempt by state", count, run=run, state=word)
    heard: dict[str, float] = defaultdict(lambda: float("inf"))
    for rank in view.state.ranks.values():
        name = node_of(view, rank)
        heard[name] = min(heard[name], rank.last_seen)
    for host, seen in heard.items():
        docs = "Time of the last event of the node's most silent rank"
        into.gauge("node_last_seen_timestamp_seconds", docs, seen, run=run, node=host)
    if view.is_supervised and not view.state.ended:
        for host, seen in heard.items():
            docs = "Time since the last event of the node's most silent rank"
            into.gauge("heartbeat_age_seconds", docs, max(0.0, view.now - seen), run=run, node=host)
    for word, count in node_counts(view).items():
        into.gauge("nodes", "Nodes of the run by what they are to it", count, run=run, state=word)
    for sample in view.state.nodes.values():
        used = sample.memory_used
        into.gauge("node_memory_used_bytes", "Host memory in use", used, run=run, node=sample.host)
        busy = sample.cpu_percent / 100
        into.gauge("node_cpu_ratio", "Share of the host's cores in use", busy, run=run, node=sample.host)
    into.gauge("nodes_lost", "Distinct nodes lost so far", len(view.job.lost_nodes), run=run)
    into.gauge("nodes_lost_allowed", "Nodes that may be lost", view.job.nodes_lost_allowed, run=run)


def _ranks(into: Families, view: RunView) -> None:
    if len(view.state.ranks) > MOST_RANKS:
        return
    run = view.run.run_id
    scores = rank_scores(list(view.state.ranks.values()))
    for rank in view.state.ranks.values():
        name = str(rank.rank)
        docs = "Median time that ranks compute in a step over its own: below 1 is slower than most"
        into.gauge("rank_score", docs, scores.get(rank.rank), run=run, rank=name)
        seconds, own = rank.step_seconds, rank.compute_seconds
        into.gauge("rank_step_seconds", "Duration of its last step", seconds, run=run, rank=name)
        into.gauge("rank_compute_seconds", "Its part outside collectives", own, run=run, rank=name)
        into.gauge("rank_memory_bytes", "Its peak memory", rank.memory_bytes, run=run, rank=name)
