"""From what a person types (a path, a run id, the beginning of one) to the run's folder."""

from __future__ import annotations

import difflib
from pathlib import Path

from llmtrain.errors import UsageError
from llmtrain.resources import user_path
from llmtrain.run.layout import RunDir

MOST_NAMES = 5


def list_runs(storage: str | Path = "runs") -> list[RunDir]:
    """All runs directly below a storage folder, the one whose job.json is newest first; [] when there is no
    folder."""
    folder = Path(storage)
    if not folder.is_dir():
        return []
    dated: list[tuple[float, str, RunDir]] = []
    for entry in folder.iterdir():
        run = RunDir(entry)
        try:
            dated.append((run.job_json.stat().st_mtime, entry.name, run))
        except OSError:
            continue
    return [run for _, _, run in sorted(dated, key=lambda row: row[:2], reverse=True)]


def find_run(reference: str, storage: str | Path = "runs") -> RunDir:
    """Return the run that a path, a run id below `storage`, or the unambiguous beginning of a run id names.

    Raises UsageError (exit 2), which names the nearest runs, when there is none or more than one.
    """
    path = user_path(reference)
    named_by_path = "/" in reference or reference in (".", "..")
    candidates = (path,) if named_by_path else (Path(storage) / reference, path)
    for candidate in candidates:
        if RunDir(candidate).job_json.is_file():
            return RunDir(_with_name(candidate))
    if named_by_path:
        raise _not_a_run(path)
    runs = {run.run_id: run for run in list_runs(storage)}
    matches = [name for name in runs if name.startswith(reference)]
    if reference and len(matches) == 1:
        return runs[matches[0]]
    if reference and matches:
        raise UsageError(
            f"{reference!r} is the beginning of {len(matches)} runs",
            where="RUN",
            hint=f"one of: {_names(matches)}",
        )
    for candidate in candidates:
        if reference and candidate.is_dir():
            raise _not_a_run(candidate)
    raise _unknown(reference, list(runs), Path(storage))


def _with_name(path: Path) -> Path:
    """`.` and `..` have no name of their own, but a run id is a folder name."""
    return path if path.name not in ("", "..") else path.resolve()


def _not_a_run(path: Path) -> UsageError:
    if not path.exists():
        return UsageError(
            f"no such folder: {path}", where="RUN", hint="give a run id or the path of a run folder"
        )
    if RunDir(path).record_json.exists():
        return UsageError(
            f"{path} has lost its job.json",
            where="RUN",
            hint=f"put {path / 'job.json'} back, or start a new run with `llmtrain launch`",
        )
    return UsageError(f"{path} is not a run folder: it has no job.json", where="RUN")


def _unknown(reference: str, names: list[str], storage: Path) -> UsageError:
    if not names:
        return UsageError(
            f"no run named {reference!r}: there is no run below {storage}/",
            where="RUN",
            hint="give the path of a run folder, or start one with `llmtrain launch tiny`",
        )
    near = difflib.get_close_matches(reference, names, n=MOST_NAMES, cutoff=0.6)
    hint = f"did you mean {_names(near)}?" if near else f"newest runs: {_names(names)}"
    return UsageError(f"no run named {reference!r} below {storage}/", where="RUN", hint=hint)


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return shown if len(names) <= MOST_NAMES else f"{shown}, and {len(names) - MOST_NAMES} more"
