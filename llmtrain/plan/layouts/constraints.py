"""Rules that a layout must keep before memory or time are looked at. Each refusal names the inequality and
both numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.config.layout import Layout
from llmtrain.plan.layouts.engine_features import EngineFeatures
from llmtrain.plan.machine import Machine
from llmtrain.plan.workload import Workload
from llmtrain.units import plural

INTERLEAVING_RULE = "interleaving over the batch"
GATHERING_RULE = "zero 3 over the batch"
BATCH_RULES = (INTERLEAVING_RULE, GATHERING_RULE)
"""The rules of the settings that depend on the batch, too."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a layout cannot be used."""

    rule: str
    """Short name that refusals are grouped by."""
    message: str
    """The violated inequality with both numbers."""
    hint: str = ""
    """The knob that would change it."""
    of_knobs: bool = False
    """Whether another setting (schedule, recomputation, ZeRO) of the same axes could mend it."""


def refusals(
    work: Workload, layout: Layout, machine: Machine, nodes: int, features: EngineFeatures
) -> Iterator[Refusal]:
    """Yield every rule that a layout breaks on `nodes` nodes."""
    yield from _world(layout, machine, nodes)
    yield from _batch(work, layout)
    yield from _tensor(work, layout, machine)
    yield from _axes(work, layout, features)
    yield from knob_refusals(work, layout, features)


def knob_refusals(work: Workload, layout: Layout, features: EngineFeatures) -> Iterator[Refusal]:
    """Yield the rules that the settings beside the axes break."""
    chunks, layers = layout.pp * layout.vpp, work.model.layers
    if chunks > layers and layout.vpp > 1:
        yield _knob(
            "layers over stages",
            f"pp {layout.pp} x vpp {layout.vpp} = {chunks} > {layers} layers",
            "lower vpp",
        )
    elif layers % chunks and not features.uneven_layers:
        yield _knob(
            "layers over stages",
            f"layers {layers} mod (pp {layout.pp} x vpp {layout.vpp} = {chunks}) = {layers % chunks}, "
            "must be 0",
            "choose pp x vpp that divides the layers",
        )
    if layout.vpp > 1 or layout.schedule == "interleaved":
        yield from _interleaving(work, layout)
    if layout.sequence_parallel and layout.tp == 1:
        yield _knob("sequence parallel", "sequence_parallel=true needs tp > 1, tp is 1", "switch it off")
    elif layout.sequence_parallel and work.sequence // layout.cp % layout.tp:
        rest = work.sequence // layout.cp % layout.tp
        yield _knob(
            "sequence parallel",
            f"sequence {work.sequence} mod tp {layout.tp} = {rest}, must be 0",
            "lower tp",
        )
    if layout.zero == 3:
        yield from _gathering(work, layout)
    for setting in features.missing(layout):
        yield _knob(
            "engine", f"the engine cannot run {setting}", "leave it to auto, or plan for another engine"
        )


def _knob(rule: str, message: str, hint: str) -> Refusal:
    return Refusal(rule, message, hint, of_knobs=True)


def _interleaving(work: Workload, layout: Layout) -> Iterator[Refusal]:
    if layout.pp == 1:
        yield _knob("interleaving", f"vpp {layout.vpp} needs pp > 1, pp is 1", "use vpp=1")
        return
    if (layout.vpp > 1) != (layout.schedule == "interleaved"):
        yield _knob(
            "interleaving",
            f"schedule {layout.schedule} does not go with vpp {layout.vpp}",
            "vpp > 1 and schedule interleaved belong together",
        )
    total = work.global_batch // layout.micro_batch
    share, extra = divmod(total, layout.dp)
    if share % layout.pp or extra:
        bad = share if share % layout.pp else share + 1
        yield _knob(
            INTERLEAVING_RULE,
            f"accumulation {bad} mod pp {layout.pp} = {bad % layout.pp}, must be 0 with vpp {layout.vpp}",
            "use vpp=1 or an accumulation that pp divides",
        )


def _gathering(work: Workload, layout: Layout) -> Iterator[Refusal]:
    total = work.global_batch // layout.micro_batch
    if total % layout.dp:
        yield _knob(
            GATHERING_RULE,
            f"{total} micro-batches mod dp {layout.dp} = {total % layout.dp}, must be 0 with zero 3",
            "use zero=2, or a dp that divides the micro-batches",
        )


def _world(layout: Layout, machine: Machine, nodes: int) -> Iterator[Refusal]:
    world, room = layout.world_size, nodes * machine.gpus_per_node
    product = f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {world}"
    if world > room:
        yield Refusal(
            "world size",
            f"{product} > {room} = {plural(nodes, 'node')} x {machine.gpus_per_node}",
            "lower a degree or add nodes",
        )
    used = -(-world // machine.gpus_per_node)
    if world % used:
        yield Refusal(
            "whole nodes",
            f"{product} does not fill {used} nodes evenly",
            f"choose a multiple of {machine.gpus_per_node}",
        )


def _batch(work: Workload, layout: Layout) -> Iterator[Refusal]:
    count, rest = divmod(work.global_batch, layout.micro_batch)
    if rest:
        yield Refusal(
            "micro-batch",
            f"batch.global {work.global_batch} mod batch.micro {layout.micro_batch} = {rest}, must be 0",
            "choose a micro-batch that divides batch.global",
        )
        return
    if count < layout.dp:
        yield Refusal(
            "replicas",
            f"batch.global {work.global_batch} / batch.micro {layout.micro_batch} = {count} micro-batches "
            f"< dp {layout.dp}",
            "lower dp or batch.micro, or raise batch.global",
        )
        return


def _tensor(work: Workload, layout: Layout, machine: Machine) -> Iterator[Refusal]:
    tp, shape = layout.tp, work.shape
    if tp > machine.gpus_per_node:
        yield Refusal(
            "tp inside a node",
            f"tp {tp} > {machine.gpus_per_node} accelerators in a node",
            "lower tp; pp and dp may span nodes",
        )
    elif machine.gpus_per_node % tp and layout.world_size > machine.gpus_per_node:
        yield Refusal(
            "tp inside a node",
            f"{machine.gpus_per_node} accelerators in a node mod tp {tp} = {machine.gpus_per_node % tp}, "
            "must be 0",
            "choose a tp that divides gpus_per_node",
        )
    for name, value in (
        ("heads", shape.heads),
        ("kv_heads", shape.kv_heads),
        ("ffn_hidden", shape.ffn_hidden),
    ):
        if value % tp:
            yield Refusal(
                f"{name} over tp",
                f"model.{name} {value} mod tp {tp} = {value % tp}, must be 0",
                f"choose a tp that divides {value}",
            )
    if work.model.vocab < 8 * tp:
        yield Refusal("vocab over tp", f"model.vocab {work.model.vocab} < 8 x tp {tp} = {8 * tp}", "lower tp")


def _axes(work: Workload, layout: Layout, features: EngineFeatures) -> Iterator[Refusal]:
    if layout.pp > work.model.layers:
        yield Refusal("layers over stages", f"pp {layout.pp} > {work.model.layers} layers", "lower pp")
    elif work.model.layers % layout.pp and not features.uneven_layers:
        rest = work.model.layers % layout.pp
        yield Refusal(
            "layers over stages",
            f"layers {work.model.layers} mod pp {layout.pp} = {rest}, must be 0",
            "choose a pp that divides the layers",
        )
    if work.sequence % (2 * layout.cp) and layout.cp > 1:
        yield Refusal(
            "sequence over cp",
            f"sequence {work.sequence} mod (2 x cp {layout.cp}) = {work.sequence % (2 * layout.cp)}, "
            "must be 0",
        )
    if layout.ep > 1 and work.shape.experts % layout.ep:
        yield Refusal(
            "experts over ep",
            f"experts {work.shape.experts} mod ep {layout.ep} = {work.shape.experts % layout.ep}, must be 0",
            "choose an ep that divides the experts"
            if work.shape.experts > 1
            else "ep needs a mixture of experts",
        )
    if layout.ep > 1 and (layout.dp * layout.cp) % layout.ep:
        yield Refusal("ep over ranks", f"dp x cp {layout.dp * layout.cp} mod ep {layout.ep} must be 0")


def too_many_ranks(tp: int, cp: int, pp: int, room: int) -> Refusal:
    """More ranks than there are accelerators."""
    return Refusal(
        "world size",
        f"tp {tp} x pp {pp} x cp {cp} = {tp * cp * pp} > {room} accelerators",
        "lower a degree or add nodes",
    )


def too_big(need: float, usable: float) -> Refusal:
    """More memory than the fullest rank has, both in bytes."""
    return Refusal(
        "memory",
        f"{need / 1e9:.1f} GB > {usable / 1e9:.1f} GB usable on the fullest rank",
        "recompute more, lower batch.micro, or use more tp, pp or nodes",
    )
