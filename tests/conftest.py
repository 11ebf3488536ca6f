"""What every test has: its own home folder, no network, and skips that fail where nothing may skip."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

MUST_RUN = "LLMTRAIN_TESTS_MUST_RUN"
RERUN = "LLMTRAIN_TESTS_RERUN"
REAL_TIME = ("beds", "cli/test_startup.py", "contract", "e2e", "observe", "slurm", "ssh", "supervise")
"""Below tests/: real daemons, kills and clocks, where another process of the machine may take the time that a
test allows."""

# CI must give one answer for one state of the code; people's runs go on looking for new cases.
hypothesis.settings.register_profile(
    "house",
    deadline=None,
    print_blob=True,
    derandomize=os.environ.get(MUST_RUN) == "1",
    # How fast cases are drawn tells of the machine's load, not of the code.
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("house")


LONG = (*REAL_TIME, "engine", "packaging")
"""Below tests/: files that may take minutes, however few tests they have."""
LONG_TESTS = 12
"""As many tests such a file counts for at least, when several workers share the files."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With LLMTRAIN_TESTS_RERUN=1 a failing test of real time is run once more; both outcomes are listed.

    Workers (`--dist loadfile --no-loadscope-reorder`) get the largest files first, so that none of them is
    left with a long one when the others have nothing more to do.
    """
    if hasattr(config, "workerinput"):
        counts = Counter(item.path for item in items)
        items.sort(key=lambda item: -max(counts[item.path], LONG_TESTS * _place(item).startswith(LONG)))
    if os.environ.get(RERUN) != "1":
        return
    for item in items:
        if _place(item).startswith(REAL_TIME):
            item.add_marker(pytest.mark.flaky(reruns=1))


def _place(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).as_posix()


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the home folder of whoever runs it."""
    home = tmp_path_factory.getbasetemp() / "home"
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(home))
    for name, folder in (("CONFIG", ".config"), ("STATE", ".state"), ("CACHE", ".cache"), ("DATA", ".data")):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(home / folder))
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection of this process to another machine fails the test."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else ""
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(host):
            raise AssertionError(f"a test tried to reach {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1", "", socket.gethostname()) or host.startswith("127.")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where LLMTRAIN_TESTS_MUST_RUN=1 says that everything is installed, a skip fails (but for GPUs)."""
    report = yield
    expected = hasattr(report, "wasxfail") or item.get_closest_marker("gpu") is not None
    if os.environ.get(MUST_RUN) == "1" and report.skipped and not expected:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{MUST_RUN}=1 allows no skip: {reason}"
    return report
