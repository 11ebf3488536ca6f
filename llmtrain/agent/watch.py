"""A running node script and its ranks: what becomes of them is said in messages to the supervisor."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from llmtrain.agent import messages
from llmtrain.agent.kernel_log import KernelWord
from llmtrain.agent.pulse import Pulse
from llmtrain.agent.ranks import RankProcess, Ranks, failures_in_log, last_lines, tail_bytes, tree_of
from llmtrain.agent.relay import Relay
from llmtrain.agent.sweep import is_running, kill_all, leftovers
from llmtrain.run.layout import AttemptDir, RunDir

EXIT_CODE_SECONDS = 5.0
"""Longest wait for torchrun's word on the exit code of a rank that it collected before we could look."""
ORPHAN_SECONDS = 0.5
"""How long ranks may outlive their torchrun before they count as orphans."""
TORCHRUN_SECONDS = 10.0
"""How long torchrun may take to leave after its last rank left in order; it waits for its peers' ranks."""
COLLECT_SECONDS = 1.0
"""For the kernel to hand over ranks that were killed with their torchrun."""
REPORTED_LINES = 20
STATE, EXIT_CODE = 0, 49
"""Places in /proc/PID/stat after the command's name: fields 3 and 52 of proc(5), a wait status the latter."""


class ScriptWatch:
    """Watches one started node script; `look` is called at every tick and whenever a process dies."""

    def __init__(
        self,
        attempt: AttemptDir,
        start: messages.Start,
        script: subprocess.Popen[bytes],
        send: Callable[[messages.Message], None],
        *,
        log: Path,
    ) -> None:
        """`log` is where the script's output goes."""
        self.script, self.ranks, self.pulse = script, Ranks(), Pulse()
        self._kernel = KernelWord()
        self.is_over = False
        """Whether the script has ended and everything was said about it."""
        self._attempt, self._start, self._send = attempt, start, send
        ranks = range(start.first_rank, start.first_rank + start.ranks)
        files = [attempt.rank_events(rank) for rank in ranks]
        self._relay = Relay([*files, attempt.agent_events(start.node)])
        self.log = log
        self._unexplained: list[tuple[RankProcess, float]] = []
        self._a_rank_died = False
        self._script_end = float("inf")
        self._ranks_gone = time.monotonic()

    def look(self, now: float) -> list[RankProcess]:
        """Report what has changed; returns ranks that were seen for the first time."""
        new = []
        if len(self.ranks.known) < self._start.ranks:
            new = list(self.ranks.discover(self.script.pid))
            self.pulse.add(new)
            for process in new:
                self._kernel.watch(process.pid)
                self._send(messages.RankSpawned(rank=process.rank, pid=process.pid))
        ended = list(self.ranks.ended())
        self._relay_events()
        # A torchrun that is killed takes its ranks along: then it is the one to name.
        with_torchrun = (self.script.poll() or 0) < 0 or self._is_being_killed()
        for process, code in ended:
            self._report_end(process, code, killed=with_torchrun)
            if code is None:
                self._unexplained.append((process, now))
        self._explain(now)
        self._look_at_script(now)
        return new

    def tell_what_is_seen(self) -> None:
        """Say what each rank is doing, and what the kernel says."""
        self._send(
            messages.Seen(
                ranks=self.pulse.evidence(time.monotonic()),
                kernel=self._kernel.lines(),
                oom_kills=self._kernel.oom_kills(),
            )
        )

    def is_pointless(self, now: float) -> bool:
        """Whether waiting longer for ranks that were asked to leave cannot save anything.

        A rank that died leaves its peers hanging. Once all ranks have left in order, only torchrun's own end
        is awaited, since its exit code says whether they did.
        """
        if self.ranks.alive:
            self._ranks_gone = now
            return self._a_rank_died
        return self._a_rank_died or not self.ranks.known or now - self._ranks_gone > TORCHRUN_SECONDS

    def tear_down(self, run: RunDir) -> tuple[int, ...]:
        """Kill what is left of the attempt on this node; the pids of what would not die."""
        kill_all(tree_of(self.script.pid))
        with suppress(subprocess.TimeoutExpired):
            self.script.wait(1.0)
        self._collect_ranks()
        older = leftovers(run.path, self._attempt.number + 1)
        mine = [process for process in older if self._is_mine(process)]
        kill_all(mine)
        return tuple(process.pid for process in mine if is_running(process))

    # ---- reports
    def _look_at_script(self, now: float) -> None:
        exit_code = self.script.poll()
        if exit_code is None:
            return
        self._script_end = min(self._script_end, now)
        if self.ranks.alive and now - self._script_end <= ORPHAN_SECONDS:
            return
        self._explain(now + EXIT_CODE_SECONDS)
        self._report_unseen()
        self._relay_events()
        if exit_code < 0:
            self.tell_what_is_seen()  # Nobody has the time to ask before this agent leaves.
        lines = () if exit_code == 0 else last_lines(self.log, REPORTED_LINES)
        self._send(messages.ScriptEnded(exit_code=exit_code, lines=lines))
        self.is_over = True

    def _is_being_killed(self) -> bool:
        """Whether a signal has ended torchrun's main thread and the kernel still waits for its other threads:
        the ranks hear of the main thread's end, the parent only of the last one's."""
        try:
            stat = Path(f"/proc/{self.script.pid}/stat").read_text(encoding="ascii", errors="replace")
            fields = stat.rpartition(")")[2].split()
            return fields[STATE] in ("Z", "X") and int(fields[EXIT_CODE]) & 0x7F != 0
        except (OSError, IndexError, ValueError):
            return False

    def _relay_events(self) -> None:
        for line in self._relay.poll():
            self._send(messages.Relayed(line=line))

    def _report_end(self, process: RankProcess, code: int | None, *, killed: bool = False) -> None:
        log = self._attempt.rank_log(process.rank)
        self._send(
            messages.RankEnded(
                rank=process.rank,
                pid=process.pid,
                exit_code=code,
                asked=process.asked,
                killed=killed,
                lines=() if code == 0 else last_lines(log, REPORTED_LINES),
            )
        )
        if code and not self._a_rank_died:
            self._a_rank_died = True
            if not (process.asked or killed):
                self.tell_what_is_seen()

    def _explain(self, now: float) -> None:
        """Report once more the ranks whose exit code torchrun has told by now."""
        if not self._unexplained:
            return
        codes = {failure.pid: failure.exit_code for failure in failures_in_log(tail_bytes(self.log))}
        waiting = []
        for process, since in self._unexplained:
            code = codes.get(process.pid)
            if code is not None:
                self._report_end(process, code)
            elif now - since < EXIT_CODE_SECONDS:
                waiting.append((process, since))
        self._unexplained = waiting

    def _report_unseen(self) -> None:
        """Ranks that failed so soon after their start that only torchrun saw them."""
        for failure in failures_in_log(tail_bytes(self.log)):
            if failure.pid not in self.ranks.known:
                rank = self._start.first_rank + failure.local_rank
                unseen = RankProcess(rank=rank, pid=failure.pid, pidfd=None)
                self._report_end(unseen, failure.exit_code)

    # ---- the end
    def _collect_ranks(self) -> None:
        """Reap ranks that became our children when torchrun died, and say how they ended."""
        deadline = time.monotonic() + COLLECT_SECONDS
        while self.ranks.alive and time.monotonic() < deadline:
            for process, code in self.ranks.ended():
                self._report_end(process, code, killed=True)
            time.sleep(0.005)
        self._relay_events()

    def _is_mine(self, process: psutil.Process) -> bool:
        """Whether a process with the run's marker is of this script: of its session, or our orphan."""
        try:
            of_session = os.getsid(process.pid) == self.script.pid
            return of_session or any(parent.pid == os.getpid() for parent in process.parents())
        except (psutil.Error, OSError):
            return False
