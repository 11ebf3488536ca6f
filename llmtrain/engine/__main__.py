"""The start of a rank: `torchrun ... -m llmtrain.engine <run>/job.json`.

Everything here runs before torch is imported, so that a rank is seen, logged and killable from its first
instant.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from pathlib import Path

from llmtrain.engine.process import (
    StopFlag,
    die_with_parent,
    dump_stacks_on_signal,
    nothing_collected,
    redirect_output,
)
from llmtrain.engine.rank_env import RankEnv, check_place, read_rank_env
from llmtrain.engine.standby import wait_in_standby
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.events.schema import PhaseStarted, RankFailed, RankStarted
from llmtrain.events.writer import EventWriter
from llmtrain.run.layout import RunDir


def main(arguments: list[str]) -> int:
    """Run one rank; return its exit code. Raises UsageError when it was not started by torchrun for an
    attempt."""
    die_with_parent()
    stop = StopFlag()
    stop.listen()
    if len(arguments) != 1:
        raise UsageError("usage: torchrun ... -m llmtrain.engine <run>/job.json")
    run = RunDir(Path(arguments[0]).resolve().parent)
    env = read_rank_env()
    if env.standby and not wait_in_standby(stop):
        return 0
    attempt = run.attempt(env.attempt)
    redirect_output(attempt.rank_log(env.rank))
    dump_stacks_on_signal(attempt.rank_stacks(env.rank))
    with EventWriter(
        attempt.rank_events(env.rank), run=env.run_id, attempt=env.attempt, source="rank", rank=env.rank
    ) as writer:
        writer.emit(RankStarted(host=socket.gethostname(), pid=os.getpid(), local_rank=env.local_rank))
        writer.emit(PhaseStarted(phase="start"))
        return _train(run, env, writer, stop)


def _train(run: RunDir, env: RankEnv, writer: EventWriter, stop: StopFlag) -> int:
    """Import torch and train; every failure becomes an event and a traceback in the rank's log."""
    try:
        with nothing_collected():
            from llmtrain.engine.rank import run_rank
            from llmtrain.run.job_file import read_attempt_file, read_job_file

        job = read_job_file(run.job_json)
        attempt = read_attempt_file(run.attempt(env.attempt).attempt_json)
        check_place(env, attempt.ranks)
        run_rank(run, env, job, attempt, emit=writer.emit, flush=writer.flush, stop=stop)
    except BaseException as error:
        traceback.print_exc()
        writer.emit(_failure(error))
        return 1
    return 0


def _failure(error: BaseException) -> RankFailed:
    try:
        from llmtrain.engine.failures import FailedInStep, describe, error_class
    except ImportError:  # torch itself could not be imported
        return RankFailed(error=f"{type(error).__name__}: {error}", error_class="user_code")
    step = 0
    if isinstance(error, FailedInStep):
        step, error = error.step, error.cause
    return RankFailed(error=describe(error), error_class=error_class(error), step=step)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except LlmtrainError as failure:
        sys.stderr.write(failure.text() + "\n")
        code = int(failure.exit_status)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after a failure, threads of a collective whose peer is gone would keep the process alive.
    os._exit(code)
