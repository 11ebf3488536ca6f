"""`llmtrain checkpoint`: list, show, verify and prune the checkpoints of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.cli import console
from llmtrain.cli.options import RUNS, Json, RunName, Runs
from llmtrain.cli.subcommands import interchange
from llmtrain.errors import ExitStatus

if TYPE_CHECKING:
    from llmtrain.errors import Problem
    from llmtrain.run.checkpoints import Checkpoint, Manifest, Retention
    from llmtrain.run.layout import RunDir

_HELP = "List, show, verify, prune, export and import checkpoints."


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help=_HELP, rich_markup_mode=None, no_args_is_help=True)
    group.command("list")(_list)
    group.command("show")(_show)
    group.command("verify")(_verify)
    group.command("prune")(_prune)
    group.command("export")(interchange.export)
    group.command("import")(interchange.import_)
    app.add_typer(group, name="checkpoint")


def _list(reference: RunName, runs: Runs = RUNS, as_json: Json = False) -> None:
    """List all checkpoints, newest first.

    Also faults that show without reading the shards. "complete" means that all files are there and have their
    sizes; `verify` reads every byte.
    """
    from llmtrain.run.checkpoints import list_checkpoints, lost_pointer, read_pointer, verify

    root = _root(reference, runs)
    found = [(checkpoint, verify(checkpoint.path, checksums=False)) for checkpoint in list_checkpoints(root)]
    if as_json:
        documents = [
            {**_summary(checkpoint), "problems": console.problem_documents(problems)}
            for checkpoint, problems in found
        ]
        console.emit_json({"path": str(root), "latest": read_pointer(root), "checkpoints": documents})
        return
    console.say_problems(lost_pointer(root, [checkpoint for checkpoint, _ in found]), word="warning")
    if not found:
        console.say(f"there is no checkpoint in {root}")
        return
    rows = [_row(checkpoint, problems) for checkpoint, problems in found]
    console.emit(
        console.columns(
            ["NAME", "STEP", "SAMPLES", "SIZE", "SHARDS", "FILE TIME", "KIND", "STATE"],
            rows,
            right=(1, 2, 3, 4),
        )
    )


def _show(
    reference: RunName,
    step: Annotated[
        int | None, typer.Argument(metavar="[STEP]", min=0, help="Default: the newest checkpoint.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor, too.")] = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Show what one checkpoint holds.

    Also faults that show without reading the shards, as in `list`.
    """
    from llmtrain.run.checkpoints import read_manifest, resolve_step, verify

    checkpoint = resolve_step(_root(reference, runs), step)
    manifest = read_manifest(checkpoint.path)
    problems = verify(checkpoint.path, checksums=False)
    if as_json:
        console.emit_json({"checkpoint": _document(checkpoint, manifest, problems)})
        return
    console.say_problems(problems, word="problem")
    _print(checkpoint, manifest, problems)
    if tensors:
        rows = [
            [key, entry.dtype, "x".join(map(str, entry.shape)) or "scalar", str(len(entry.pieces))]
            for key, entry in manifest.tensors.items()
        ]
        console.emit(console.columns(["TENSOR", "DTYPE", "SHAPE", "PIECES"], rows, right=(3,)))


def _verify(
    reference: RunName,
    step: Annotated[
        int | None, typer.Argument(metavar="[STEP]", min=0, help="Default: all checkpoints.")
    ] = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Read every byte of one checkpoint, or of all.

    Everything is compared with the manifest. Exit code 1 when one is damaged.
    """
    from llmtrain.run.checkpoints import list_checkpoints, lost_pointer, resolve_step, verify

    run = _run(reference, runs)
    root = run.checkpoints
    chosen = [resolve_step(root, step)] if step is not None else list_checkpoints(root)
    lost = lost_pointer(root, chosen) if step is None else []
    if not as_json:
        console.say_problems(lost, word="problem")
    if not chosen:
        resolve_step(root, None)
    found: dict[Checkpoint, list[Problem]] = {}
    for checkpoint in chosen:
        problems = found[checkpoint] = verify(checkpoint.path, run_id=_run_id(run.path))
        if not as_json:
            console.emit(f"{checkpoint.name}: {'damaged' if problems else 'whole'}")
            console.say_problems(problems, word="problem")
    if as_json:
        console.emit_json(_verdicts(found, lost))
    if lost or any(found.values()):
        raise typer.Exit(ExitStatus.FAILED)


def _prune(
    reference: RunName,
    keep: Annotated[
        int, typer.Option("--keep", metavar="K", min=1, help="Newest whole checkpoints to keep.")
    ],
    keep_every: Annotated[
        int | None,
        typer.Option("--keep-every", metavar="N", min=1, help="Keep multiples of N steps, too."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted.")] = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Delete all but the K newest whole checkpoints.

    Damaged ones do not count. Reads every byte of the K that are kept, so that a whole one is never deleted
    for a damaged one; what is kept besides is looked at by its size.
    """
    from llmtrain.run.checkpoints import delete, kept_for_ever, retention

    root = _root(reference, runs)
    found = retention(root, keep, protect=kept_for_ever(keep_every), checksums=True, all_kept=True)
    if not dry_run:
        delete(found.outdated)
    _tell_pruned(found, dry_run=dry_run, as_json=as_json)


def _tell_pruned(found: Retention, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        deleted, kept = ([each.name for each in part] for part in (found.outdated, found.kept))
        damaged = [
            {"name": name, "problems": console.problem_documents(problems)}
            for name, problems in found.damaged.items()
        ]
        console.emit_json({"deleted": deleted, "dry_run": dry_run, "kept": kept, "damaged": damaged})
        return
    for checkpoint in found.outdated:
        console.emit(f"{'would delete' if dry_run else 'deleted'} {checkpoint.name}")
    console.say_problems([each for problems in found.damaged.values() for each in problems], word="problem")
    damaged_too = f", {', '.join(found.damaged)} damaged, which count for none" if found.damaged else ""
    console.say(f"{len(found.kept)} kept{damaged_too}")


def _run(reference: str, runs: Path) -> RunDir:
    from llmtrain.run.find import find_run

    return find_run(reference, runs)


def _root(reference: str, runs: Path) -> Path:
    return _run(reference, runs).checkpoints


def _run_id(path: Path) -> str:
    """The run's id from job.json, for a run folder may have been renamed; "" when it cannot be read."""
    try:
        return str(json.loads((path / "job.json").read_bytes())["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _summary(checkpoint: Checkpoint) -> dict[str, Any]:
    from llmtrain.errors import CheckpointError
    from llmtrain.run.checkpoints import read_manifest

    document: dict[str, Any] = {
        "name": checkpoint.name,
        "step": checkpoint.step,
        "path": str(checkpoint.path),
    }
    try:
        manifest = read_manifest(checkpoint.path)
        # A manifest tells no time; a copy of a checkpoint may have its own.
        saved = (checkpoint.path / "manifest.json").stat().st_mtime
    except (CheckpointError, OSError):
        return document
    info = manifest.info
    return {
        **document,
        "run_id": info.run_id,
        "recipe_digest": info.recipe_digest,
        "consumed_samples": info.consumed_samples,
        "layout": dict(info.layout),
        "bytes": manifest.nbytes,
        "shards": len(manifest.shards),
        "tensors": len(manifest.tensors),
        "saved": saved,
        "base": info.base.name if info.base else None,
    }


def _document(checkpoint: Checkpoint, manifest: Manifest, problems: Sequence[Problem]) -> dict[str, Any]:
    """All of one checkpoint, as `show` tells it."""
    listed = {key: {"dtype": t.dtype, "shape": list(t.shape)} for key, t in manifest.tensors.items()}
    shards = [{"file": s.file, "bytes": s.bytes, "checksum": s.checksum} for s in manifest.shards]
    return {
        **_summary(checkpoint),
        "extra": manifest.info.extra,
        "files": shards,
        "tensor_list": listed,
        "problems": console.problem_documents(problems),
    }


def _verdicts(found: Mapping[Checkpoint, Sequence[Problem]], lost: Sequence[Problem]) -> dict[str, Any]:
    """What `verify` found, newest first; `lost` is wrong with no checkpoint, but with their pointer."""
    documents = [
        {"name": each.name, "step": each.step, "problems": console.problem_documents(problems)}
        for each, problems in found.items()
    ]
    newest = next((each.name for each, problems in found.items() if not problems), None)
    return {
        "checkpoints": documents,
        "newest_whole": newest,
        "problems": console.problem_documents(lost),
    }


def _row(checkpoint: Checkpoint, problems: Sequence[Problem]) -> list[str]:
    from llmtrain.units import format_bytes

    summary = _summary(checkpoint)
    state = problems[0].message if problems else "complete"
    if "bytes" not in summary:
        return [checkpoint.name, str(checkpoint.step), "-", "-", "-", "-", "-", state]
    return [
        checkpoint.name,
        str(checkpoint.step),
        f"{summary['consumed_samples']:,}",
        format_bytes(summary["bytes"]),
        str(summary["shards"]),
        _time(summary["saved"]),
        f"since {summary['base']}" if summary["base"] else "full",
        state,
    ]


def _print(checkpoint: Checkpoint, manifest: Manifest, problems: Sequence[Problem]) -> None:
    from llmtrain.errors import CheckpointError
    from llmtrain.run.checkpoints import read_chain
    from llmtrain.units import format_bytes

    summary, info = _summary(checkpoint), manifest.info
    layout = " ".join(f"{key}={value}" for key, value in info.layout.items())
    kinds = sorted({entry.dtype for entry in manifest.tensors.values()})
    try:
        chain = [link.path.name for link in read_chain(checkpoint.path, manifest)]
    except CheckpointError:  # one of the problems that were told
        chain = [checkpoint.name, manifest.info.base.name if manifest.info.base else "?"]
    lines = {
        "path": checkpoint.path,
        "run": info.run_id,
        "step": f"{info.step:,}",
        "samples": f"{info.consumed_samples:,}",
        "saved": f"{_time(summary['saved'])} (file time)" if "saved" in summary else "-",
        "kind": "full" if len(chain) == 1 else f"incremental, builds upon {', '.join(chain[1:])}",
        "size": f"{format_bytes(manifest.nbytes)} in {len(manifest.shards)} shards",
        "tensors": f"{len(manifest.tensors):,} ({', '.join(kinds)})",
        "layout": layout or "-",
        "recipe": info.recipe_digest or "-",
        "state": "damaged" if problems else "complete (`verify` reads every byte)",
    }
    for name, value in lines.items():
        console.emit(f"{name:<8} {value}")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
