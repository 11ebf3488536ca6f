"""`python -m llmtrain.supervise RUN_DIR`: the supervisor of one run, until the run has ended.

`launch` and `resume` start it detached; a scheduler's batch step may run it in the foreground. Its exit code
is the run's.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llmtrain.backends.base import AllocationBackend, Backend, dead_holder
from llmtrain.backends.registry import load_backend
from llmtrain.config.cluster import ClusterProfile
from llmtrain.errors import ExitStatus, LlmtrainError, UsageError
from llmtrain.run.job_file import JobFile, read_job_file
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import Lease, LeaseLostError, acquire
from llmtrain.run.record import read_record, write_record
from llmtrain.supervise import storage
from llmtrain.supervise.control import Control
from llmtrain.supervise.detection.limits import (
    Limits,
    limits_for,
    predicted_save_seconds,
    predicted_step_seconds,
)
from llmtrain.supervise.metrics_process import MetricsProcess
from llmtrain.supervise.supervisor import Supervisor


def main(
    argv: list[str],
    backend_of: Callable[[ClusterProfile, RunDir], Backend] = lambda cluster, run: load_backend(cluster),
    adjust: Callable[[Limits], Limits] = lambda limits: limits,
) -> int:
    """Take the lease, supervise, release it; return the run's exit code. A rehearsal brings a backend and
    limits of its own."""
    options = _options(argv)
    run = RunDir(options.run_dir.resolve())
    try:
        job = read_job_file(run.job_json)
        backend = backend_of(job.spec.cluster, run)
        lease = _take_lease(run, backend, options.wait_for_lease)
    except LlmtrainError as error:
        storage.say(error.text())
        return int(error.exit_status)
    try:
        lease.keep_fresh()
        return int(_supervise(run, job, backend, lease, adjust))
    except LeaseLostError as error:
        storage.say(error.text())
        return int(ExitStatus.FAILED)
    except LlmtrainError as error:
        storage.say(error.text())
        return int(_record_failure(run, lease, error.text(), error.exit_status))
    except Exception as error:
        storage.say(traceback.format_exc())
        message = f"the supervisor failed: {type(error).__name__}: {error} (see {run.supervisor_log})"
        return int(_record_failure(run, lease, message, ExitStatus.FAILED))
    finally:
        lease.release()


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m llmtrain.supervise")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--wait-for-lease",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for an earlier supervisor, which may be on a lost machine, to count as dead",
    )
    return parser.parse_args(argv)


def _take_lease(run: RunDir, backend: Backend, patience: float) -> Lease:
    """Take the lease, at once when the scheduler says that the holder's job is over. Raises UsageError."""
    allocation = backend.allocation() if isinstance(backend, AllocationBackend) else ""
    deadline = time.monotonic() + patience
    while True:
        try:
            return acquire(run, allocation=allocation, dead=dead_holder(run, backend))
        except UsageError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(1.0)


def _supervise(
    run: RunDir, job: JobFile, backend: Backend, lease: Lease, adjust: Callable[[Limits], Limits]
) -> ExitStatus:
    is_in_job = isinstance(backend, AllocationBackend) and bool(backend.allocation())
    record = read_record(run)
    if is_in_job and record.stage == "ended" and record.exit_status == ExitStatus.DONE:
        sys.stderr.write("the run is done; its job was started again by somebody else\n")
        return ExitStatus.DONE
    plan = run.plan_json
    limits = adjust(
        limits_for(
            predicted_step_seconds(plan),
            job.spec.cluster.patience,
            save_seconds=predicted_save_seconds(plan),
        )
    )
    control = Control(run, limits.save, is_for_good=is_in_job)
    control.listen()
    try:
        while True:
            supervisor = Supervisor(run, job, backend, lease, control=control, limits=limits)
            try:
                with MetricsProcess(run, job.spec.cluster.metrics, supervisor.tell):
                    return supervisor.run()
            except OSError as error:
                # What it ran has been ended; once there is room again, it goes on like one that is resumed.
                if not storage.may_pass(error):
                    raise
                if not storage.wait_for_storage(run.path, control):
                    raise
                storage.say(f"went on after: {error}")
    except LeaseLostError:
        raise
    except LlmtrainError as error:
        if not control.is_leaving():
            raise
        message = "stopped before the attempt began"
        return _record_failure(run, lease, f"{message} ({error})", ExitStatus.RESUMABLE)


def _record_failure(run: RunDir, lease: Lease, message: str, status: ExitStatus) -> ExitStatus:
    """Say in the record why the supervisor itself failed, so that no view shows the run as running."""
    try:
        record = replace(read_record(run), stage="ended", exit_status=int(status), message=message)
        write_record(run, record, lease)
    except LlmtrainError as error:
        storage.say(error.text())
    except OSError as error:
        storage.say(str(error))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
