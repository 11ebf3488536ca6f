"""One rank's life with torch: join the others, build, restore, train, leave."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from llmtrain.corpus.corpora import open_corpora
from llmtrain.engine.build import Parts, build_parts
from llmtrain.engine.clock import TraceFile, trace_place
from llmtrain.engine.device import Device, choose_device, init_process_group
from llmtrain.engine.disturbance import disturbance
from llmtrain.engine.failures import FailedInStep, error_class
from llmtrain.engine.flight import flight
from llmtrain.engine.loop import Loop, peak_flops
from llmtrain.engine.micro_batch import DeviceMeter, MicroBatchControl
from llmtrain.engine.numerics.rehearsal import why_idle
from llmtrain.engine.prefetch import PrefetchedBatches
from llmtrain.engine.process import StopFlag
from llmtrain.engine.rank_env import RankEnv
from llmtrain.engine.saving import FROM_MEMORY, checkpoints_of
from llmtrain.errors import ConfigError, Problem
from llmtrain.events.schema import Notice, Payload, PhaseStarted, RankFinished, Restored
from llmtrain.run.data_file import read_data_file
from llmtrain.run.job_file import AttemptFile, JobFile
from llmtrain.run.layout import RunDir
from llmtrain.run.memory_file import MemoryFile, write_memory_file
from llmtrain.units import plural

Emit = Callable[[Payload], None]


def run_rank(
    run: RunDir,
    env: RankEnv,
    job: JobFile,
    attempt: AttemptFile,
    *,
    emit: Emit,
    flush: Callable[[], object],
    stop: StopFlag,
) -> None:
    """Train until the end or until asked to stop. `flush` waits for what was told, not for ever. Raises
    ConfigError, CorpusError, CheckpointError, and what torch raises before the first step, then FailedInStep;
    `emit` has told the phases so far."""
    _check_world(run, env, attempt)
    emit = _noting_phases(emit)
    recipe = job.spec.recipe
    device = _join(env, job)
    emit(PhaseStarted(phase="build"))
    disturbance.prepare(recipe.faults.inject, env.rank, env.attempt)
    if env.rank == 0:
        _tell_about_numbers(recipe, device, attempt.layout, emit)
    parts, batches = _build(run, env, job, attempt, device)
    emit(PhaseStarted(phase="load"))
    checkpoints = checkpoints_of(run, job.run_id, attempt, parts, flush)
    progress, name, reason = checkpoints.restore(attempt.restore)
    if env.rank == 0:
        _tell_restored(Restored(step=progress.step, checkpoint=name, reason=reason), emit)
    capacity = device.memory_capacity(env.local_world_size)
    micro_batch = MicroBatchControl(parts, emit, DeviceMeter(device, capacity))
    micro_batch.begin(run, progress.extra, progress.step)
    loop = Loop(
        parts,
        checkpoints,
        emit,
        should_stop=lambda: stop.is_set,
        peak_flops=peak_flops(job.spec.cluster.accelerator, recipe.precision.mode),
        trace=_trace_file(run, env, parts),
        micro_batch=micro_batch,
        between_failures=attempt.between_failures,
    )
    try:
        ended = loop.run(progress)
    except BaseException as error:
        if error_class(error) == "out_of_memory":
            _note_memory(run, attempt, MemoryFile(rank=env.rank, step=loop.step, layout=parts.layout))
        raise FailedInStep(loop.step, error) from error
    finally:
        batches.close()
    leave(parts)
    emit(RankFinished(reason=ended, step=loop.step))


def _join(env: RankEnv, job: JobFile) -> Device:
    """Choose the device and meet the other ranks."""
    accelerator = job.spec.cluster.accelerator
    device = choose_device(env.local_rank, accelerator if isinstance(accelerator, str) else accelerator.name)
    if env.world_size > 1:
        patience = timedelta(seconds=job.spec.cluster.patience.collective)
        init_process_group(device, env.rank, env.world_size, patience)
    return device


def _build(
    run: RunDir, env: RankEnv, job: JobFile, attempt: AttemptFile, device: Device
) -> tuple[Parts, PrefetchedBatches]:
    """All that the rank trains with, its batches read ahead by a thread that the caller closes."""
    recipe = job.spec.recipe
    corpora = open_corpora(read_data_file(run.data_json), recipe, run.path.parent)
    parts = build_parts(
        recipe,
        attempt.layout,
        env.rank,
        device,
        train=corpora.train,
        validation=corpora.validation,
        ranks_per_node=env.local_world_size,
    )
    batches = PrefetchedBatches(parts.batches, device, parts.steps)
    return replace(parts, batches=batches), batches


def _trace_file(run: RunDir, env: RankEnv, parts: Parts) -> TraceFile:
    place = trace_place(parts.groups, parts.layout, parts.batches.micro_batches)
    return TraceFile(run.attempt(env.attempt).rank_trace(env.rank), place)


def _check_world(run: RunDir, env: RankEnv, attempt: AttemptFile) -> None:
    """Raise ConfigError unless torchrun started as many ranks as the attempt's layout has."""
    if attempt.layout.world_size != env.world_size:
        raise ConfigError(
            [
                Problem(
                    str(run.attempt(env.attempt).attempt_json),
                    f"its layout needs {attempt.layout.world_size} ranks, torchrun started {env.world_size}",
                )
            ]
        )


def _note_memory(run: RunDir, attempt: AttemptFile, note: MemoryFile) -> None:
    """Leave word that memory ran out, for the attempts that follow."""
    with suppress(OSError):  # What killed the training is told in any case.
        write_memory_file(run, attempt.number, note)


def _noting_phases(emit: Emit) -> Emit:
    """Tell, and note phases in the flight recorder, which the agent can read from now on."""
    flight.open()

    def emit_and_note(payload: Payload) -> None:
        if isinstance(payload, PhaseStarted):
            flight.doing(payload.phase)
        emit(payload)

    return emit_and_note


def leave(parts: Parts) -> None:
    """Part from the others, together."""
    if parts.groups.world.size > 1:
        dist.barrier()
        dist.destroy_process_group()


def _tell_about_numbers(recipe: Recipe, device: Device, layout: Layout, emit: Emit) -> None:
    """What a person must know about formats that are not to be had, and about a rehearsal."""
    if recipe.precision.mode == "tf32" and not device.has_tf32:
        where = device.torch_device.type
        emit(Notice(message=f"this {where} has no TF32: precision.mode tf32 computes in fp32"))
    if recipe.faults.inject:
        text = f"REHEARSAL: the recipe injects {plural(len(recipe.faults.inject), 'fault')} (faults.inject)"
        emit(Notice(message=text, level="warning"))
    for number, fault in enumerate(recipe.faults.inject):
        if idle := why_idle(fault, recipe.model, layout, disturbance.attempt):
            text = f"faults.inject.{number} ({fault.kind}) does nothing: {idle}"
            emit(Notice(message=text, level="warning"))


def _tell_restored(restored: Restored, emit: Emit) -> None:
    emit(restored)
    if restored.reason and restored.step and restored.reason != FROM_MEMORY:
        text = f"restored step {restored.step}, not the newest checkpoint: {restored.reason}"
        emit(Notice(message=text, level="warning"))
