"""This machine alone: would a run work here, and what would be in its way."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from llmtrain.backends.health import Check, judge
from llmtrain.errors import ExitStatus
from llmtrain.observe.terminal_views.tables import add_column, one_line_table
from llmtrain.observe.wording import STYLES
from llmtrain.probe.facts import Disk, Machine, WriteTest
from llmtrain.probe.machine import probe_disk, probe_machine, probe_write


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All checks of a machine."""

    machine: Machine
    disk: Disk | None
    write: WriteTest
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> str:
        """The worst level in one sentence."""
        failures = sum(check.level == "failure" for check in self.checks)
        warnings = sum(check.level == "warning" for check in self.checks)
        if failures:
            return f"a run would not work here: {failures} of {len(self.checks)} checks failed"
        if warnings:
            return f"a run can work here; {warnings} of {len(self.checks)} checks deserve a look"
        return "a run can work here"

    @property
    def exit_status(self) -> ExitStatus:
        """DONE unless a check failed."""
        failed = any(check.level == "failure" for check in self.checks)
        return ExitStatus.FAILED if failed else ExitStatus.DONE

    def document(self) -> dict[str, Any]:
        """What `doctor --json` prints."""
        return {
            "schema": 1,
            "verdict": self.verdict,
            "ok": self.exit_status is ExitStatus.DONE,
            "machine": asdict(self.machine),
            "disk": asdict(self.disk) if self.disk else None,
            "write_test": asdict(self.write),
            "checks": [asdict(check) for check in self.checks],
        }


def diagnose(runs: Path) -> Diagnosis:
    """Probe this machine and the folder of run directories, and judge them."""
    machine, disk, write = probe_machine(), probe_disk(runs), probe_write(runs)
    return Diagnosis(machine=machine, disk=disk, write=write, checks=tuple(judge(machine, disk, write)))


def checks_table(diagnosis: Diagnosis) -> Table:
    """One line a check; hints stand on lines of their own."""
    table = one_line_table()
    for name in ("check", "result", "found"):
        add_column(table, name, rest=name == "found")
    for check in diagnosis.checks:
        style = STYLES.get({"ok": "alive", "failure": "failed"}.get(check.level, check.level), "")
        table.add_row(check.name, Text(check.level, style=style), check.found)
    return table
