"""What must hold inside a recipe's sections on numbers and its batch ramp."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.config.defaults import training_steps
from llmtrain.config.recipe import Recipe
from llmtrain.config.rules.rule import Rule, rule
from llmtrain.errors import Problem


@rule("learning_rate.peak", "learning_rate.final")
def _final_below_peak(recipe: Recipe) -> Iterator[Problem]:
    rate = recipe.learning_rate
    if rate.final is not None and rate.final > rate.peak:
        yield Problem(
            "learning_rate.final",
            f"learning_rate.final = {rate.final:g} is more than peak = {rate.peak:g}",
            "swap them",
        )


@rule("train", "learning_rate", "batch", "model.sequence", "faults.inject")
def _phases_fit(recipe: Recipe) -> Iterator[Problem]:
    """Warm-up and decay share the steps; what names a step names one that comes."""
    if (recipe.train.steps is None) == (recipe.train.tokens is None) or not _ramp_is_sound(recipe):
        return
    steps, rate = training_steps(recipe), recipe.learning_rate
    if rate.warmup_steps > steps:
        yield Problem(
            "learning_rate.warmup_steps",
            f"learning_rate.warmup_steps = {rate.warmup_steps} is more than train.steps = {steps}",
            "the peak would never be reached; lower it, or train longer",
        )
    elif rate.schedule == "wsd" and rate.warmup_steps + (rate.decay_steps or 0) > steps:
        yield Problem(
            "learning_rate.decay_steps",
            f"learning_rate.warmup_steps + decay_steps = {rate.warmup_steps + (rate.decay_steps or 0)} "
            f"is more than train.steps = {steps}",
            "lower one of them, or train longer",
        )
    ramp = recipe.batch.ramp
    if ramp is not None and ramp.steps > steps:
        yield Problem(
            "batch.ramp.steps",
            f"batch.ramp.steps = {ramp.steps} is more than train.steps = {steps}",
            "batch.global would never be reached; lower it, or train longer",
        )
    for number, step in enumerate(recipe.train.trace_steps):
        if step > steps:
            yield _never(f"train.trace_steps.{number}", step, steps)
    for number, fault in enumerate(recipe.faults.inject):
        if fault.step > steps:
            yield _never(f"faults.inject.{number}.step", fault.step, steps)


def _never(where: str, step: int, steps: int) -> Problem:
    return Problem(where, f"{where} = {step} is after the last step: train.steps = {steps}")


@rule("learning_rate")
def _decay_needs_wsd(recipe: Recipe) -> Iterator[Problem]:
    rate = recipe.learning_rate
    if rate.decay_steps is not None and rate.schedule != "wsd":
        yield Problem(
            "learning_rate.decay_steps",
            f"learning_rate.decay_steps = {rate.decay_steps} has no effect with schedule = {rate.schedule}",
            "set learning_rate.schedule to wsd, or remove it",
        )


@rule("batch.ramp", "batch.global")
def _ramp_grows(recipe: Recipe) -> Iterator[Problem]:
    ramp, final = recipe.batch.ramp, recipe.batch.global_size
    if ramp is None:
        return
    if ramp.start >= final:
        yield Problem(
            "batch.ramp.start",
            f"batch.ramp.start = {ramp.start} is not less than batch.global = {final}",
            "the batch only grows; remove the ramp",
        )
    elif len(ramp.sizes(final)) > ramp.steps:
        yield Problem(
            "batch.ramp.steps",
            f"batch.ramp.steps = {ramp.steps} is less than its {len(ramp.sizes(final))} sizes",
            "every size lasts a step at least; raise steps or increment",
        )


@rule("batch.ramp", "batch.global", "batch.micro")
def _ramp_in_micro_batches(recipe: Recipe) -> Iterator[Problem]:
    ramp, micro = recipe.batch.ramp, recipe.batch.micro
    if ramp is None or not isinstance(micro, int):
        return
    for name, value in (("start", ramp.start), ("increment", ramp.increment or micro)):
        if value % micro:
            yield Problem(
                f"batch.ramp.{name}",
                f"batch.micro = {micro} does not divide batch.ramp.{name} = {value}",
                "an optimizer step is made of whole micro-batches",
            )


@rule("clip")
def _clip_range(recipe: Recipe) -> Iterator[Problem]:
    clip = recipe.clip
    if clip.percentile is None:
        return
    if not clip.norm:
        yield Problem("clip.percentile", "clip.percentile needs clip.norm > 0", "norm is its upper end")
    elif clip.lowest > clip.norm:
        yield Problem("clip.lowest", f"clip.lowest = {clip.lowest:g} is more than clip.norm = {clip.norm:g}")


@rule("stability", "faults.inject", "model.layers")
def _stability(recipe: Recipe) -> Iterator[Problem]:
    stability = recipe.stability
    if stability.spikes.action == "rewind" and stability.snapshot_every == 0:
        yield Problem(
            "stability.snapshot_every",
            "stability.snapshot_every = 0, but stability.spikes.action = rewind needs snapshots",
            "remove it, or set action to skip",
        )
    for number, fault in enumerate(recipe.faults.inject):
        if fault.kind != "bad_batch" and fault.layer >= recipe.model.layers:
            yield Problem(
                f"faults.inject.{number}.layer",
                f"faults.inject.{number}.layer = {fault.layer}, but the layers are "
                f"0..{recipe.model.layers - 1}",
            )


def _ramp_is_sound(recipe: Recipe) -> bool:
    ramp, final = recipe.batch.ramp, recipe.batch.global_size
    return ramp is None or (ramp.start < final and len(ramp.sizes(final)) <= ramp.steps)


NUMERICS_RULES: tuple[Rule[Recipe], ...] = (
    _final_below_peak,
    _phases_fit,
    _decay_needs_wsd,
    _ramp_grows,
    _ramp_in_micro_batches,
    _clip_range,
    _stability,
)
