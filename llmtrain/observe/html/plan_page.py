"""`plan --html`: the chosen layout as one page: where ranks lie, what stages hold, and one step in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from llmtrain.config.job import JobSpec
from llmtrain.config.layout import Layout
from llmtrain.observe.html.page import page, table
from llmtrain.observe.html.svg import COLOURS, drawing, figure, legend, share_bar
from llmtrain.observe.html.timeline_plot import MOST_BARS, planned_plot
from llmtrain.observe.wording import bytes_text, count_text, duration_text, layout_text, percent_text
from llmtrain.plan.evaluate import Evaluator
from llmtrain.plan.make import make_evaluator
from llmtrain.plan.placement import rank_order
from llmtrain.plan.plan import Candidate, MemoryBytes, Plan
from llmtrain.plan.timing.timeline import Timeline, timeline
from llmtrain.plan.workload import make_workload
from llmtrain.units import DAY, percent, plural

MEMORY = ("parameters", "gradients", "optimizer", "activations", "workspace")
STEP = (
    "forward",
    "backward",
    "recompute",
    "head",
    "tensor",
    "context",
    "expert",
    "pipeline",
    "bubble",
    "data",
    "optimizer",
    "overhead",
)
STEP_WORDS = {
    "head": "embedding and head",
    "tensor": "tensor-parallel traffic",
    "context": "context-parallel traffic",
    "expert": "expert traffic",
    "pipeline": "stage-to-stage traffic",
    "data": "gradients and weights",
}
MOST_NODES = 256
"""Nodes drawn; the rest are counted."""
CELL, CELLS_ACROSS = 14, 8
"""Pixels of a rank's cell, and most cells side by side."""
GAP, NODE_HEAD = 14, 16
"""Pixels between two nodes, and of the line that names one."""
READABLE_ROUNDS = 2
"""Micro-batches for each stage that still make bars wide enough to read."""
WIDTH = 1120


def plan_page(spec: JobSpec, plan: Plan, nodes: int) -> str:
    """The page of the first plan on `nodes` nodes."""
    return page(f"{spec.recipe.name} on {spec.cluster.name}", _sections(spec, plan, nodes))


def _sections(spec: JobSpec, plan: Plan, nodes: int) -> Iterator[str]:
    best, evaluator = plan.plans[0], make_evaluator(spec)
    yield f"<h1>{escape(spec.recipe.name)} on {escape(spec.cluster.name)}</h1>"
    yield table(("", ""), _facts(spec, plan, best, nodes), header=False)
    yield "<h2>Nodes</h2>" + nodes_plot(best.layout, plan.gpus_per_node, nodes)
    yield "<h2>Stages</h2>" + memory_plot(_stage_memories(evaluator, best), _stage_names(spec, best.layout))
    yield "<h2>One step</h2>" + share_bar("Where its time goes", _step_parts(best), text=duration_text)
    if best.layout.pp > 1:
        yield schedule_plot(best)
    if len(plan.plans) > 1:
        yield "<h2>Plans</h2>" + table(("plan", "layout", "step", "MFU", "memory"), _plans(plan.plans))
    if len(plan.ladder) > 1:
        yield "<h2>When nodes are lost</h2>" + table(
            ("nodes left", "layout", "step", "idle nodes"), _ladder(plan)
        )


def _facts(spec: JobSpec, plan: Plan, best: Candidate, nodes: int) -> Iterator[Sequence[str]]:
    predicted, batch = best.predicted, spec.recipe.batch.global_size
    memory = predicted.memory
    yield "model", f"{count_text(plan.model.parameters)} parameters"
    yield "layout", layout_text({name: getattr(best.layout, name) for name in best.layout.__slots__})
    yield (
        "batch",
        f"{batch} samples a step, {best.accumulation} micro-batches of {best.layout.micro_batch} a replica",
    )
    yield "ranks", f"{plural(best.layout.world_size, 'rank')} on {plural(nodes, 'node')}"
    band = f" (within {percent_text(predicted.error)})" if predicted.error else ""
    speed = f"{count_text(predicted.tokens_per_second_per_gpu)} tokens/s on each"
    yield "step", f"{duration_text(predicted.step_seconds)}{band}, {speed}"
    yield (
        "use",
        f"MFU {percent(predicted.mfu)}, pipeline bubble {percent(predicted.bubble_ratio)}",
    )
    yield "memory", f"{bytes_text(memory.total)} of {bytes_text(memory.capacity)} on the fullest rank"
    yield "training", f"{duration_text(predicted.train_days * DAY)}, {predicted.gpu_hours:,.1f} GPU hours"


def _stage_memories(evaluator: Evaluator, best: Candidate) -> list[MemoryBytes]:
    model, capacity = evaluator.memory_model, best.predicted.memory.capacity
    stages = range(best.layout.pp)
    return [model.stage(best.layout, stage, best.accumulation).by_kind(capacity) for stage in stages]


def _stage_names(spec: JobSpec, layout: Layout) -> list[str]:
    counts = make_workload(spec.recipe, spec.cluster.software.framework).stage_layers(layout)
    return [f"stage {stage}: {plural(count, 'layer')}" for stage, count in enumerate(counts)]


def _step_parts(best: Candidate) -> list[tuple[str, float]]:
    return [(STEP_WORDS.get(name, name), getattr(best.parts, name)) for name in STEP]


def _plans(plans: Sequence[Candidate]) -> Iterator[Sequence[str]]:
    for number, each in enumerate(plans, start=1):
        layout = layout_text({name: getattr(each.layout, name) for name in each.layout.__slots__})
        step, memory = duration_text(each.predicted.step_seconds), bytes_text(each.predicted.memory.total)
        yield str(number), layout, step, percent(each.predicted.mfu), memory


def _ladder(plan: Plan) -> Iterator[Sequence[str]]:
    for rung in plan.ladder:
        if rung.candidate is None:
            yield str(rung.nodes), "nothing fits", "", ""
            continue
        layout = rung.candidate.layout
        words = layout_text({name: getattr(layout, name) for name in layout.__slots__})
        seconds = duration_text(rung.candidate.predicted.step_seconds)
        yield str(rung.nodes), words, seconds, str(rung.idle_nodes)


def nodes_plot(layout: Layout, per_node: int, nodes: int) -> str:
    """A box a node and a cell a rank, coloured by pipeline stage; empty boxes are spares."""
    order = rank_order(layout, per_node)
    across = min(CELLS_ACROSS, per_node)
    box_width, box_height = across * CELL + 8, -(-per_node // across) * CELL + 8
    per_line = max(1, (WIDTH + GAP) // (box_width + GAP))
    shown = min(nodes, MOST_NODES)
    parts: list[str] = []
    for node in range(shown):
        x = (node % per_line) * (box_width + GAP)
        y = (node // per_line) * (box_height + NODE_HEAD + GAP)
        ranks = order[node] if node < len(order) else ()
        name = f"node {node}" if ranks else f"node {node}: spare"
        parts.append(f'<text x="{x}" y="{y + 11}">{name}</text>')
        y += NODE_HEAD
        parts.append(f'<rect class="frame" x="{x + 0.5}" y="{y}" width="{box_width}" height="{box_height}"/>')
        for place, rank in enumerate(ranks):
            parts.append(_cell(layout, rank, x + 5 + place % across * CELL, y + 5 + place // across * CELL))
    height = -(-shown // per_line) * (box_height + NODE_HEAD + GAP)
    used_width = min(shown, per_line) * (box_width + GAP)
    title = "Ranks on nodes, coloured by stage" + (
        f" (the first {shown} of {nodes})" if shown < nodes else ""
    )
    stages = ((stage, f"stage {stage}") for stage in range(min(layout.pp, COLOURS)))
    again = " and so on, colours come again" if layout.pp > COLOURS else ""
    # As wide as on other machines, so that few nodes are not blown up.
    picture = drawing(title, parts, height, width=max(WIDTH, used_width))
    return figure(title, picture + legend(stages, after=again))


def _cell(layout: Layout, rank: int, x: int, y: int) -> str:
    where = layout.dims.coordinate(rank)
    words = " ".join(f"{axis}{getattr(where, axis)}" for axis in ("pp", "dp", "cp", "tp"))
    return (
        f'<rect class="c{where.pp % COLOURS}" x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}">'
        f"<title>rank {rank}: {words}</title></rect>"
    )


def memory_plot(stages: Sequence[MemoryBytes], names: Sequence[str]) -> str:
    """One bar a stage, cut into what fills it; the dashed line is what the device has."""
    left, right, row, top = 150, 90, 22, 6
    largest = max(*(memory.total for memory in stages), stages[0].capacity)
    scale = (WIDTH - left - right) / largest
    parts = []
    for index, (memory, name) in enumerate(zip(stages, names, strict=True)):
        y, x = top + index * row, float(left)
        parts.append(f'<text class="label" x="{left - 8}" y="{y + 14}">{escape(name)}</text>')
        for colour, kind in enumerate(MEMORY):
            size = getattr(memory, kind)
            parts.append(
                f'<rect class="c{colour}" x="{x:.1f}" y="{y + 2}" width="{size * scale:.1f}" '
                f'height="{row - 5}"><title>{kind} {bytes_text(size)}</title></rect>'
            )
            x += size * scale
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{bytes_text(memory.total)}</text>')
    height, limit = top + row * len(stages) + 6, left + stages[0].capacity * scale
    parts.append(f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="{height}"/>')
    title = f"Memory of a rank of each stage; {bytes_text(stages[0].capacity)} are there (dashed)"
    return figure(title, drawing(title, parts, height, width=WIDTH) + legend(enumerate(MEMORY)))


def schedule_plot(best: Candidate) -> str:
    """The step's passes stage by stage, in the order that the engine runs them."""
    layout, micro_batches = best.layout, best.accumulation
    drawn, count = drawable(layout, micro_batches)
    if not drawn.slots:
        return figure("Schedule", '<p class="empty">these micro-batches do not fit the schedule</p>')
    title = f"Schedule {layout.schedule}: {percent(drawn.bubble_ratio)} of the stages' time is idle"
    if count < micro_batches:
        predicted = 100 * best.predicted.bubble_ratio
        title += f" with the {count} micro-batches drawn; {predicted:.1f} % with all {micro_batches}"
    whole = planned_plot(title, drawn, layout.vpp)
    few = READABLE_ROUNDS * layout.pp
    if count <= 2 * few:
        return whole
    near = timeline(layout.schedule, layout.pp, layout.vpp, few)
    return whole + planned_plot(f"The same with {few} micro-batches, to tell passes apart", near, layout.vpp)


def drawable(layout: Layout, micro_batches: int) -> tuple[Timeline, int]:
    """The step's timeline and its micro-batches: fewer, in whole rounds, where all were too many bars."""
    most = max(1, MOST_BARS // (3 * layout.pp * layout.vpp))
    count = micro_batches if micro_batches <= most else max(layout.pp, most // layout.pp * layout.pp)
    return timeline(layout.schedule, layout.pp, layout.vpp, count), count
