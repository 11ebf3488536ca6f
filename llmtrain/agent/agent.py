"""One node of one attempt: runs the node script, reports what happens to its ranks, leaves nothing behind.

One thread, one loop: lines from the supervisor, deaths (pidfds) and a tick. Whatever ends the conversation
(a stop, the end of the supervisor's channel, its silence, a signal) ends the same way: ranks are asked to
save and leave, then everything is killed, then that is verified.
"""

from __future__ import annotations

import dataclasses
import os
import select
import selectors
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

from llmtrain import __version__
from llmtrain.agent import messages
from llmtrain.agent.door import Door, knock
from llmtrain.agent.link import Link
from llmtrain.agent.orphan import call_for_help
from llmtrain.agent.ranks import open_pidfd
from llmtrain.agent.room import no_room_for
from llmtrain.agent.scratch import Scratch
from llmtrain.agent.script import start_script
from llmtrain.agent.sweep import sweep
from llmtrain.agent.watch import ScriptWatch
from llmtrain.events.schema import NodeSample
from llmtrain.events.writer import EventWriter
from llmtrain.run.layout import RunDir
from llmtrain.run.parent import adopt_orphans

SAMPLE_SECONDS = 10.0
SILENCE_SECONDS = 60.0
"""A supervisor that says nothing for so long over an open channel is taken for gone."""


class Agent:
    """The agent of node `node` in attempt `attempt`; `run` returns its exit code."""

    def __init__(self, run: RunDir, attempt: int, node: int, link: Link) -> None:
        self.run_dir, self.attempt, self.node, self.link = run, run.attempt(attempt), node, link
        self.start: messages.Start | None = None
        self.watch: ScriptWatch | None = None
        self.writer: EventWriter | None = None
        self.stage = "idle"
        self._door = Door()
        self._scratch = Scratch(run.path, attempt)
        self._selector = selectors.DefaultSelector()
        self._selector.register(link.incoming, selectors.EVENT_READ, None)
        self._deadline = float("inf")
        self._heard = self._sampled = time.monotonic()
        self._signals = 0
        self._was_stopped = self._was_told = False

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
            select.select([self.link.incoming], [], [], messages.TICK_SECONDS)
            for message in self.link.read():
                self._heard = time.monotonic()
                self._obey(message)
        return False

    # ---- what the supervisor says
    def _obey(self, message: messages.Message) -> None:
        match message:
            case messages.Ping():
                quiet = None if self.watch is None else self.watch.pulse.quiet(time.monotonic())
                self.link.send(messages.Alive(ranks=self._ranks_alive(), stage=self.stage, quiet=quiet))
            case messages.PickPort():
                self.link.send(messages.Port(port=self._door.open()))
            case messages.Reach():
                error = knock(message.address, message.port, message.timeout, message.retries)
                self.link.send(messages.Reached(error=error))
            case messages.Start() if self.watch is None and self.stage == "idle":
                self._begin(message)
            case messages.Go() if self.watch is not None and self.stage == "standby":
                self._release(message, self.watch)
            case messages.Stop(grace=grace):
                self._was_stopped = True
                self._leave(grace)
            case messages.Look() if self.watch is not None:
                self.watch.tell_what_is_seen()
            case messages.DumpStacks() if self.watch is not None:
                self.watch.ranks.dump_stacks()

    def _begin(self, start: messages.Start) -> None:
        self._door.close()
        if start.standby and (reason := no_room_for(start.ranks)):
            self.link.send(messages.Declined(reason=reason))
            return
        if not start.standby:
            swept = sweep(self.run_dir.path, older_than=start.attempt, standby_too=True)
            self._scratch.sweep()
            if swept.killed:
                text = f"killed leftovers of an earlier attempt: {swept.killed}"
                self.link.send(messages.Note(message=text))
        self.start, log = start, self._script_log(start)
        script = start_script(self.run_dir, start, log, self._scratch.variables())
        self._wake_on_end(open_pidfd(script.pid))
        self.watch = ScriptWatch(self.attempt, start, script, self.link.send, log=log)
        if start.standby:
            self.stage = "standby"
        else:
            self._run()

    def _script_log(self, start: messages.Start) -> Path:
        if not start.standby:
            return self.attempt.node_log(self.node)
        # Nothing of an attempt's folder exists before the attempt does.
        return self.run_dir.attempt(start.attempt - 1).standby_log(self.node)

    def _release(self, go: messages.Go, watch: ScriptWatch) -> None:
        """Let ranks in standby go on: the end of their standard input is the sign."""
        if self.start is not None:
            self.start = dataclasses.replace(self.start, grace=go.grace, when_orphaned=go.when_orphaned)
        log = self.attempt.node_log(self.node)
        log.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            watch.log = watch.log.rename(log)
        if watch.script.stdin is not None:
            watch.script.stdin.close()
        self._run()

    def _run(self) -> None:
        self.stage = "running"
        self.writer = EventWriter(
            self.attempt.agent_events(self.node),
            run=self.run_dir.run_id,
            attempt=self.attempt.number,
            source="agent",
        )

    def _leave(self, grace: float) -> None:
        """Ask the ranks to save and leave; a second call can only hasten the end."""
        self.stage = "leaving"
        self._deadline = min(self._deadline, time.monotonic() + grace)
        if self.watch is not None:
            self.watch.ranks.ask_to_leave()

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    # ---- what happens on the node
    def _wait(self) -> None:
        if self.link.wants_to_write:
            self.link.write()
        for key, _ in self._selector.select(messages.TICK_SECONDS):
            if key.data is not None:
                self._selector.unregister(key.fd)

    def _wake_on_end(self, pidfd: int | None) -> None:
        if pidfd is not None:
            self._selector.register(pidfd, selectors.EVENT_READ, pidfd)

    def _look(self) -> None:
        now = time.monotonic()
        if self.link.is_closed and self.link.incoming in self._selector.get_map():
            self._selector.unregister(self.link.incoming)
        gone = self.link.is_closed or self._signals or now - self._heard > SILENCE_SECONDS
        if self._signals and not self._was_told and not self._was_stopped:
            self._was_told = True
            self.link.send(messages.Told())
        if gone and self.stage != "leaving":
            self._leave(self.start.grace if self.start else 0.0)
        if self._signals > 1:
            self._leave(0.0)
        if self.watch is not None:
            self._look_at_script(self.watch, now)
        elif self.stage == "leaving":
            self.stage = "gone"
        if now - self._sampled > SAMPLE_SECONDS:
            self._sample(now)

    def _look_at_script(self, watch: ScriptWatch, now: float) -> None:
        for process in watch.look(now):
            self._wake_on_end(process.pidfd)
        if self.stage == "leaving":
            watch.ranks.ask_to_leave()  # also those that were only just seen
            if now >= self._deadline or watch.is_pointless(now):
                self.stage = "gone"
        if watch.is_over:
            self.stage = "gone"

    def _ranks_alive(self) -> tuple[int, ...]:
        processes = self.watch.ranks.alive.values() if self.watch is not None else ()
        return tuple(sorted(process.rank for process in processes))

    def _sample(self, now: float) -> None:
        self._sampled = now
        memory = psutil.virtual_memory()
        sample = NodeSample(
            node=self.node,
            host=socket.gethostname(),
            cpu_percent=psutil.cpu_percent(),
            memory_used=memory.total - memory.available,
            memory_total=memory.total,
            ranks_alive=self._ranks_alive(),
        )
        if self.writer is not None:
            self.writer.emit(sample)

    def _tear_down(self) -> tuple[int, ...]:
        if self.writer is not None:
            self.writer.close(2.0)
        left = () if self.watch is None else self.watch.tear_down(self.run_dir)
        self._scratch.remove()
        return left


def agent_main(run_dir: Path, attempt: int, node: int) -> int:
    """Entry point of the agent process."""
    return Agent(RunDir(run_dir), attempt, node, Link()).run()
