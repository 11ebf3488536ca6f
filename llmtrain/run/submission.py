"""`submission.json`: the scheduler's jobs that `launch` or `resume` submitted last."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.config.codec import to_json
from llmtrain.run.atomic import write_json
from llmtrain.run.job_file import read_document
from llmtrain.run.layout import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One submission; a chain has several jobs."""

    schema: int = 1
    backend: str
    jobs: tuple[str, ...]
    """Ids, in the order in which they run."""
    name: str
    """What the scheduler calls them."""
    submitted: float
    """Epoch seconds."""


def write_submission(run: RunDir, submission: Submission) -> None:
    """Replace the file. Raises OSError."""
    write_json(run.submission_json, to_json(submission))


def read_submission(run: RunDir) -> Submission | None:
    """The last submission, or None when the run never had one. Raises RunError when the file is damaged."""
    return read_document(run.submission_json, Submission) if run.submission_json.exists() else None
