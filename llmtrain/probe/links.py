"""InfiniBand and RoCE ports, from sysfs."""

from __future__ import annotations

from pathlib import Path

from llmtrain.probe.facts import IbPort

ROOT = Path("/sys/class/infiniband")


def probe_infiniband(root: Path = ROOT) -> tuple[IbPort, ...]:
    """Every port of every adapter; () on a machine without."""
    try:
        ports = sorted(root.glob("*/ports/*"))
    except OSError:
        return ()
    return tuple(
        IbPort(
            name=f"{port.parents[1].name}/{port.name}",
            state=_word(port / "state"),
            physical=_word(port / "phys_state"),
            rate=_line(port / "rate"),
        )
        for port in ports
    )


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _word(path: Path) -> str:
    """`ACTIVE` of `4: ACTIVE`."""
    return _line(path).rpartition(":")[2].strip()
