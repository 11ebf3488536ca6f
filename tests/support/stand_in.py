"""A torch-free stand-in for torchrun and the engine that speaks the same contracts, for quick tests.

`python stand_in.py launcher RUN_DIR ATTEMPT NODE_RANK RANKS NODES` behaves like torchrun: it starts ranks
with torchrun's variables, reports a failed one in torchrun's words, and then ends the others with SIGTERM.
`python stand_in.py rank JOB_JSON` is such a rank: it writes the engine's events, commits pretended
checkpoints, and on SIGTERM saves and leaves. `RUN_DIR/behaviour.json` tells it what to do wrong.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from llmtrain.engine.process import die_with_parent
from llmtrain.events import schema
from llmtrain.events.writer import EventWriter
from llmtrain.run.layout import RunDir

NODE_SCRIPT = """#!/bin/bash
exec {python} {stand_in} launcher {run_dir} "$1" "$2" "$4" "$3"
"""


def install(run: RunDir, **behaviour: object) -> None:
    """Put the stand-in in the place of the rendered node script."""
    run.scripts.mkdir(parents=True, exist_ok=True)
    text = NODE_SCRIPT.format(python=sys.executable, stand_in=__file__, run_dir=shlex.quote(str(run.path)))
    (run.scripts / "node.sh").write_text(text)
    (run.path / "behaviour.json").write_text(json.dumps(behaviour))


def launcher(run_dir: Path, attempt: int, node: int, ranks: int, nodes: int) -> int:
    workers = []
    for local_rank in range(ranks):
        rank = node * ranks + local_rank
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(nodes * ranks),
            "TORCHELASTIC_RUN_ID": f"{run_dir.name}.{attempt}",
        }
        workers.append(
            subprocess.Popen([sys.executable, __file__, "rank", str(run_dir / "job.json")], env=environment)
        )
    while True:
        codes = [worker.poll() for worker in workers]
        for local_rank, code in enumerate(codes):
            if code:
                pid = workers[local_rank].pid
                print(f"failed (exitcode: {code}) local_rank: {local_rank} (pid: {pid}) of binary: python")
                return _end(workers)
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.1)


def _end(workers: list[subprocess.Popen[bytes]]) -> int:
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    deadline = time.monotonic() + 30
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    return 1


class Rank:
    """One pretended rank; steps are files in RUN_DIR/steps, so that restarts can be checked."""

    def __init__(self, job_json: Path) -> None:
        if os.environ.get("LLMTRAIN_STANDBY") == "1":
            die_with_parent()  # else the death of its agent would look like the sign to go on
            sys.stdin.read()
        self.run = RunDir(job_json.parent)
        self.rank, self.local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self.attempt = int(os.environ["TORCHELASTIC_RUN_ID"].rpartition(".")[2])
        self.behaviour = json.loads((self.run.path / "behaviour.json").read_text())
        self.stopped = False
        attempt = self.run.attempt(self.attempt)
        attempt.logs.mkdir(parents=True, exist_ok=True)
        log = os.open(attempt.rank_log(self.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        self.events = EventWriter(
            attempt.rank_events(self.rank),
            run=self.run.run_id,
            attempt=self.attempt,
            source="rank",
            rank=self.rank,
        )

    def is_told(self, what: str, step: int) -> bool:
        """Whether the behaviour names this rank, attempt and step for something."""
        order = self.behaviour.get(what)
        if order is None or self.rank != order.get("rank", 0):
            return False
        return step == order.get("step", 1) and self.attempt in order.get("attempts", [1])

    def main(self) -> int:
        stacks = self.run.path / f"stacks-{self.rank}"
        signal.signal(signal.SIGUSR1, lambda *_: stacks.touch())
        if "ignore_term" in self.behaviour:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopped", True))
        self.events.emit(
            schema.RankStarted(host=os.uname().nodename, pid=os.getpid(), local_rank=self.local_rank)
        )
        self.events.emit(schema.PhaseStarted(phase="start"))
        step = self.newest_checkpoint()
        if self.rank == 0:
            self.events.emit(schema.Restored(step=step, checkpoint=f"step-{step}" if step else None))
        while step < self.behaviour.get("steps", 6):
            step += 1
            self.one_step(step)
            if self.stopped:
                self.save(step)
                return self.leave("stopped", step)
        self.save(step)
        return self.leave("completed", step)

    def one_step(self, step: int) -> None:
        self.events.emit(schema.PhaseStarted(phase="step", step=step))
        if self.is_told("die", step) or (self.run.path / f"die-{self.attempt}-{self.rank}").exists():
            print("last words of a dying rank")
            self.events.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_told("fail", step):
            self.events.emit(
                schema.RankFailed(
                    error="Boom: it broke", error_class=self.behaviour["fail"]["class"], step=step
                )
            )
            self.events.close()
            os._exit(1)
        if self.is_told("hang", step):
            while True:  # A signal interrupts one sleep.
                time.sleep(600)
        time.sleep(self.behaviour.get("step_seconds", 0.1))
        if "slow" in self.behaviour:
            self.tell_compute_time(step)
        if self.rank == 0:
            self.events.emit(
                schema.StepFinished(
                    step=step,
                    loss=5.0 / step,
                    grad_norm=1.0,
                    learning_rate=1e-3,
                    seconds=0.1,
                    tokens=10,
                    tokens_per_second=100.0,
                )
            )
        if step % self.behaviour.get("checkpoint_every", 2) == 0:
            self.save(step)

    def tell_compute_time(self, step: int) -> None:
        """As if each step took ten seconds, and the slow rank's longer by a share; all ranks end it together,
        as they would in a collective."""
        self.meet(step)
        slow = self.behaviour["slow"]
        is_slow = self.rank == slow["rank"] and self.attempt in slow.get("attempts", [1])
        seconds = 10.0 * (1.0 + slow["excess"] * is_slow)
        self.events.emit(schema.RankStep(step=step, seconds=seconds, compute_seconds=seconds, memory_bytes=1))

    def meet(self, step: int) -> None:
        """Wait until all ranks have come to a step."""
        here = self.run.path / "met" / f"{self.attempt}-{step}"
        here.mkdir(parents=True, exist_ok=True)
        (here / str(self.rank)).touch()
        while len(list(here.iterdir())) < int(os.environ["WORLD_SIZE"]) and not self.stopped:
            time.sleep(0.002)

    def save(self, step: int) -> None:
        if self.rank == 0 and not self.behaviour.get("no_checkpoints"):
            self.events.flush()  # A state counts once its steps are told.
            new = self.run.path / "saved.new"
            new.write_text(str(step))
            new.replace(self.run.path / "saved")  # Another rank may read it now.
            if self.behaviour.get("unannounced"):  # `resume` would look for checkpoints that are none.
                return
            if self.behaviour.get("silent_saves"):
                return  # A checkpoint that is told of is looked for before a resume.
            self.events.emit(
                schema.CheckpointCommitted(step=step, name=f"step-{step:08d}", bytes=1, seconds=0.0)
            )

    def newest_checkpoint(self) -> int:
        saved = self.run.path / "saved"
        return int(saved.read_text()) if saved.exists() else 0

    def leave(self, reason: str, step: int) -> int:
        self.events.emit(schema.RankFinished(reason=reason, step=step))
        self.events.close()
        return 0


if __name__ == "__main__":
    if sys.argv[1] == "launcher":
        sys.exit(launcher(Path(sys.argv[2]), *(int(word) for word in sys.argv[3:7])))
    sys.exit(Rank(Path(sys.argv[2])).main())
