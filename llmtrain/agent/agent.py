"""One node of one attempt: runs the node script, reports what happens to its ranks, leaves nothing behind.

One thread, one loop: lines from the supervisor, deaths (pidfds) and a tick. Whatever ends the conversation
(a stop, the end of the supervisor's channel, its silence, a signal) ends the same way: ranks are asked to
save and leave, then everything is killed, then that is verified.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from llmtrain import __version__
from llmtrain.agent import messages
from llmtrain.agent.deathsig import adopt_orphans, die_with_parent
from llmtrain.agent.door import Door, knock
from llmtrain.agent.link import Link
from llmtrain.agent.orphan import call_for_help
from llmtrain.agent.ranks import RankProcess, Ranks, failures_in_log, last_lines, tail_bytes, tree_of
from llmtrain.agent.relay import Relay
from llmtrain.agent.sweep import ATTEMPT_MARKER, RUN_MARKER, kill_all, leftovers, sweep
from llmtrain.events.schema import NodeSample
from llmtrain.events.writer import EventWriter
from llmtrain.run.layout import RunDir

TICK_SECONDS = 0.2
SAMPLE_SECONDS = 10.0
SILENCE_SECONDS = 60.0
"""A supervisor that says nothing for so long over an open channel is taken for gone."""
EXIT_CODE_SECONDS = 5.0
"""Longest wait for torchrun's word on the exit code of a rank that it collected before we could look."""
ORPHAN_SECONDS = 0.5
"""How long ranks may outlive their torchrun before they count as orphans."""
TORCHRUN_SECONDS = 10.0
"""How long torchrun may take to leave after its last rank left in order; it waits for its peers' ranks."""
REPORTED_LINES = 20


class Agent:
    """The agent of node `node` in attempt `attempt`; `run` returns its exit code."""

    def __init__(self, run: RunDir, attempt: int, node: int, link: Link) -> None:
        self.run_dir, self.attempt, self.node, self.link = run, run.attempt(attempt), node, link
        self.ranks = Ranks()
        self.relay: Relay | None = None
        self.writer: EventWriter | None = None
        self.start: messages.Start | None = None
        self.script: subprocess.Popen[bytes] | None = None
        self.stage = "idle"
        self._door = Door()
        self._selector = selectors.DefaultSelector()
        self._selector.register(link.incoming, selectors.EVENT_READ, None)
        self._unexplained: list[tuple[RankProcess, float]] = []
        self._deadline = float("inf")
        self._heard = self._sampled = time.monotonic()
        self._signals = 0
        self._failed = False
        self._script_end = float("inf")
        self._ranks_gone = time.monotonic()
        self._was_stopped = False

    def run(self) -> int:
        """Serve until everything has ended; 0 when nothing was left behind."""
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self.link.send(messages.Hello(host=socket.gethostname(), pid=os.getpid(), version=__version__))
        while self.stage != "gone":
            self._wait()
            for message in self.link.read():
                self._heard = time.monotonic()
                self._obey(message)
            self._look()
        left = self._tear_down()
        self.link.send(messages.Gone(left=left))
        self.link.drain(2.0)
        if self.start is not None and self.start.when_orphaned and self._is_orphaned():
            call_for_help(self.start.when_orphaned, self.attempt.node_log(self.node))
        return 1 if left else 0

    def _is_orphaned(self) -> bool:
        """Whether the supervisor has vanished. One that lives ends an agent that is done, by word or by
        force; one whose machine is lost leaves the channel open and silent."""
        while not self._was_stopped and not self._signals:
            if self.link.is_closed or time.monotonic() - self._heard > SILENCE_SECONDS:
                return True
            select.select([self.link.incoming], [], [], TICK_SECONDS)
            for message in self.link.read():
                self._heard = time.monotonic()
                self._obey(message)
        return False

    # ---- what the supervisor says
    def _obey(self, message: messages.Message) -> None:
        match message:
            case messages.Ping():
                alive = tuple(sorted(process.rank for process in self.ranks.alive.values()))
                self.link.send(messages.Alive(ranks=alive, stage=self.stage))
            case messages.PickPort():
                self.link.send(messages.Port(port=self._door.open()))
            case messages.Reach(address=address, port=port):
                self.link.send(messages.Reached(error=knock(address, port)))
            case messages.Start() if self.script is None and self.stage == "idle":
                self._begin(message)
            case messages.Stop(grace=grace):
                self._was_stopped = True
                self._leave(grace)
            case messages.DumpStacks():
                self.ranks.dump_stacks()

    def _begin(self, start: messages.Start) -> None:
        self._door.close()
        swept = sweep(self.run_dir.path, older_than=start.attempt)
        if swept.killed:
            self.link.send(messages.Note(message=f"killed leftovers of an earlier attempt: {swept.killed}"))
        self.start, log = start, self.attempt.node_log(self.node)
        log.parent.mkdir(parents=True, exist_ok=True)
        self.attempt.events.mkdir(parents=True, exist_ok=True)
        arguments = (start.attempt, start.node, start.nodes, start.ranks, start.address, start.port)
        markers = {RUN_MARKER: str(self.run_dir.path), ATTEMPT_MARKER: str(start.attempt)}
        with log.open("ab") as output:
            # The only fork, and before any thread exists: code between fork and exec is safe here.
            self.script = subprocess.Popen(
                ["bash", str(self.run_dir.scripts / "node.sh"), *(str(value) for value in arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **start.environment, **markers},
                start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509
            )
        self._watch(self.script.pid)
        self.stage = "running"
        ranks = range(start.first_rank, start.first_rank + start.ranks)
        files = [self.attempt.rank_events(rank) for rank in ranks]
        self.relay = Relay([*files, self.attempt.agent_events(self.node)])
        self.writer = EventWriter(
            self.attempt.agent_events(self.node),
            run=self.run_dir.run_id,
            attempt=start.attempt,
            source="agent",
        )

    def _leave(self, grace: float) -> None:
        """Ask the ranks to save and leave; a second call can only hasten the end."""
        self.stage = "leaving"
        self._deadline = min(self._deadline, time.monotonic() + grace)
        self.ranks.ask_to_leave()

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    # ---- what happens on the node
    def _wait(self) -> None:
        if self.link.wants_to_write:
            self.link.write()
        for key, _ in self._selector.select(TICK_SECONDS):
            if key.data is not None:
                self._selector.unregister(key.fd)

    def _watch(self, pid: int) -> None:
        with suppress(OSError, AttributeError):
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)

    def _look(self) -> None:
        now = time.monotonic()
        if self.link.is_closed and self.link.incoming in self._selector.get_map():
            self._selector.unregister(self.link.incoming)
        gone = self.link.is_closed or self._signals or now - self._heard > SILENCE_SECONDS
        if gone and self.stage != "leaving":
            self._leave(self.start.grace if self.start else 0.0)
        if self._signals > 1:
            self._leave(0.0)
        if self.script is not None:
            self._look_at_ranks(self.script, now)
        if self.stage == "leaving" and (
            self.script is None or now >= self._deadline or self._is_pointless(now)
        ):
            self.stage = "gone"
        if now - self._sampled > SAMPLE_SECONDS:
            self._sample(now)

    def _look_at_ranks(self, script: subprocess.Popen[bytes], now: float) -> None:
        assert self.start is not None and self.relay is not None
        if len(self.ranks.known) < self.start.ranks:
            for process in self.ranks.discover(script.pid):
                self._selector_add(process)
                self.link.send(messages.RankSpawned(rank=process.rank, pid=process.pid))
        if self.stage == "leaving":
            self.ranks.ask_to_leave()
        ended = list(self.ranks.ended())
        self._relay_events()
        for process, code in ended:
            self._report_end(process, code)
            if code is None:
                self._unexplained.append((process, now))
        self._explain(now)
        exit_code = script.poll()
        if exit_code is not None:
            self._script_end = min(self._script_end, now)
            if not self.ranks.alive or now - self._script_end > ORPHAN_SECONDS:
                self._finish(exit_code, now)

    def _selector_add(self, process: RankProcess) -> None:
        if process.pidfd is not None:
            self._selector.register(process.pidfd, selectors.EVENT_READ, process.pid)

    def _relay_events(self) -> None:
        assert self.relay is not None
        for line in self.relay.poll():
            self.link.send(messages.Relayed(line=line))

    def _explain(self, now: float) -> None:
        """Report once more the ranks whose exit code torchrun has told by now."""
        if not self._unexplained:
            return
        log = tail_bytes(self.attempt.node_log(self.node))
        codes = {failure.pid: failure.exit_code for failure in failures_in_log(log)}
        waiting = []
        for process, since in self._unexplained:
            code = codes.get(process.pid)
            if code is not None:
                self._report_end(process, code)
            elif now - since < EXIT_CODE_SECONDS:
                waiting.append((process, since))
        self._unexplained = waiting

    def _report_end(self, process: RankProcess, code: int | None, *, killed: bool = False) -> None:
        self.link.send(
            messages.RankEnded(
                rank=process.rank,
                pid=process.pid,
                exit_code=code,
                asked=process.asked,
                killed=killed,
                lines=() if code == 0 else last_lines(self.attempt.rank_log(process.rank), REPORTED_LINES),
            )
        )
        self._failed = self._failed or bool(code)

    def _report_unseen(self) -> None:
        """Ranks that failed so soon after their start that only torchrun saw them."""
        assert self.start is not None
        for failure in failures_in_log(tail_bytes(self.attempt.node_log(self.node))):
            if failure.pid not in self.ranks.known:
                rank = self.start.first_rank + failure.local_rank
                unseen = RankProcess(rank=rank, pid=failure.pid, pidfd=None)
                self._report_end(unseen, failure.exit_code)

    def _is_pointless(self, now: float) -> bool:
        """Whether waiting longer cannot save anything.

        A rank that died leaves its peers hanging. Once all ranks have left in order, only torchrun's own end
        is awaited, since its exit code says whether they did.
        """
        if self.ranks.alive:
            self._ranks_gone = now
            return self._failed
        return self._failed or not self.ranks.known or now - self._ranks_gone > TORCHRUN_SECONDS

    def _finish(self, exit_code: int, now: float) -> None:
        self._explain(now + EXIT_CODE_SECONDS)
        self._report_unseen()
        self._relay_events()
        lines = () if exit_code == 0 else last_lines(self.attempt.node_log(self.node), REPORTED_LINES)
        self.link.send(messages.ScriptEnded(exit_code=exit_code, lines=lines))
        self.stage = "gone"

    def _sample(self, now: float) -> None:
        self._sampled = now
        memory = psutil.virtual_memory()
        sample = NodeSample(
            node=self.node,
            host=socket.gethostname(),
            cpu_percent=psutil.cpu_percent(),
            memory_used=memory.total - memory.available,
            memory_total=memory.total,
            ranks_alive=tuple(sorted(process.rank for process in self.ranks.alive.values())),
        )
        if self.writer is not None:
            self.writer.emit(sample)

    # ---- the end
    def _tear_down(self) -> tuple[int, ...]:
        """Kill what is left of this attempt; the pids of what would not die."""
        number = self.attempt.number
        if self.script is not None:
            kill_all(tree_of(self.script.pid))
            with suppress(subprocess.TimeoutExpired):
                self.script.wait(1.0)
            self._collect_ranks()
        if self.writer is not None:
            self.writer.close(2.0)
        mine = [each for each in leftovers(self.run_dir.path, number + 1) if _belongs(each, self.script)]
        kill_all(mine)
        return tuple(process.pid for process in mine if process.is_running() and not _is_zombie(process))

    def _collect_ranks(self) -> None:
        """Reap ranks that became our children when torchrun died, and say how they ended."""
        deadline = time.monotonic() + 1.0
        while self.ranks.alive and time.monotonic() < deadline:
            for process, code in self.ranks.ended():
                self._report_end(process, code, killed=True)
            time.sleep(0.005)
        if self.relay is not None:
            self._relay_events()


def _belongs(process: psutil.Process, script: subprocess.Popen[bytes] | None) -> bool:
    """Whether a process with the run's marker is of this agent's script: of its session, or our orphan."""
    try:
        own_session = script is not None and os.getsid(process.pid) == script.pid
        return own_session or any(parent.pid == os.getpid() for parent in process.parents())
    except (psutil.Error, OSError):
        return False


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def agent_main(run_dir: Path, attempt: int, node: int) -> int:
    """Entry point of the agent process."""
    return Agent(RunDir(run_dir), attempt, node, Link()).run()
