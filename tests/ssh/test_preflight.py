"""Nodes held against each other: every mismatch named, with its fix."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import llmtrain
from llmtrain.backends.node_report import PACKAGES
from llmtrain.backends.preflight import Expected, Report, address_of, problems_of
from tests.support.node_reports import GOOD

EXPECTED = Expected(llmtrain="1.0", folder="/shared/runs", nonce="n")


def cluster(**changes: object) -> dict[str, Report]:
    """Three nodes, of which the last differs."""
    fine = [
        replace(
            GOOD,
            host=name,
            boot=name,
            entered_by=f"10.0.0.{number}",
            addresses={"lo": "127.0.0.1", "eth0": f"10.0.0.{number}", "ib0": f"10.1.0.{number}"},
        )
        for number, name in enumerate("abc", 1)
    ]
    return dict(zip(("n1", "n2", "n3"), [*fine[:2], replace(fine[2], **changes)], strict=True))


def test_equal_nodes_are_fit() -> None:
    assert problems_of(cluster(), EXPECTED) == {}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"llmtrain": "ModuleNotFoundError: No module named 'llmtrain'"},
            "n3: /venv/bin/python has no llmtrain (ModuleNotFoundError: No module named 'llmtrain')\n"
            "  hint: `/venv/bin/python -m pip install llmtrain==1.0` on n3, or another interpreter with "
            "backend.python; backend.ssh.push sends this one",
        ),
        (
            {"llmtrain": "0.9"},
            "n3: llmtrain 0.9 is installed, here it is 1.0\n"
            "  hint: `/venv/bin/python -m pip install llmtrain==1.0` on n3",
        ),
        (
            {"torch": ""},
            "n3: /venv/bin/python has no torch\n"
            "  hint: `/venv/bin/python -m pip install torch==2.13.0` on n3",
        ),
        (
            {"torch": "2.12.1"},
            "n3: torch 2.12.1 is installed, most nodes have 2.13.0\n"
            "  hint: `/venv/bin/python -m pip install torch==2.13.0` on n3",
        ),
        (
            {"python": "3.12.1"},
            "n3: /venv/bin/python is Python 3.12.1, most nodes have 3.11.7\n"
            "  hint: the same interpreter everywhere: backend.python",
        ),
        (
            {"nonce": ""},
            "n3: /shared/runs is not the same folder there as here\n"
            "  hint: checkpoints need a folder that all nodes and this machine share (storage.path); if only "
            "the nodes share it: storage.shared: nodes",
        ),
        (
            {"writable": False},
            "n3: user `me` may not write to /shared/runs\n"
            "  hint: `ls -ld /shared/runs` says who may; another user: backend.ssh.user",
        ),
        (
            {"entered_by": "127.0.0.1"},
            "n3: its address is 127.0.0.1, which on every other node means that node itself\n"
            "  hint: name the node by an address that the others reach, or set inter_node.interface",
        ),
        (
            {"time": 1060.0},
            "n3: its clock is 60 s ahead of this machine's\n"
            "  hint: synchronise clocks: `systemctl restart chrony` or systemd-timesyncd",
        ),
        (
            {"time": 940.0},
            "n3: its clock is 60 s behind this machine's\n"
            "  hint: synchronise clocks: `systemctl restart chrony` or systemd-timesyncd",
        ),
        (
            {"host": "a"},
            "n3: n1 and n3 both call themselves `a`\n  hint: `hostnamectl set-hostname n3` there",
        ),
        (
            {"host": "b", "boot": "b"},
            "n3: n2 and n3 are one machine, which calls itself `b`\n"
            "  hint: name every machine once in backend.ssh.hosts",
        ),
    ],
)
def test_one_node_differs(changes: dict[str, object], text: str) -> None:
    found = problems_of(cluster(**changes), EXPECTED)
    assert list(found) == ["n3"]
    assert [problem.text() for problem in found["n3"]] == [text]


def test_patch_releases_of_python_and_small_skews_do_not_matter() -> None:
    assert problems_of(cluster(python="3.11.2", time=1004.0), EXPECTED) == {}


def test_slow_answer_is_no_skew() -> None:
    assert problems_of(cluster(time=1009.0, uncertainty=6.0), EXPECTED) == {}


def test_interface() -> None:
    expected = replace(EXPECTED, interface="ib0")
    assert problems_of(cluster(), expected) == {}
    assert address_of(GOOD, "ib0") == ("10.1.0.1", "ib0")
    [problem] = problems_of(cluster(addresses={"eth0": "10.0.0.3"}), expected)["n3"]
    assert problem.text() == (
        "n3: there is no interface ib0 with an IPv4 address; there are: eth0\n"
        "  hint: inter_node.interface names an interface that every node has"
    )


def test_address_is_that_of_the_way_in() -> None:
    assert address_of(GOOD, "") == ("10.0.0.1", "eth0")
    assert address_of(replace(GOOD, entered_by="192.0.2.1"), "") == ("192.0.2.1", "")


def test_loopback_is_good_enough_for_a_single_node() -> None:
    report = {"n1": replace(GOOD, entered_by="127.0.0.1")}
    assert problems_of(report, replace(EXPECTED, several=False)) == {}


OPTIONAL = {"torch", "pyarrow", "pynvml"}
"""Has a problem of its own; is needed for some sources of text only; tells of GPUs where it is there."""


def imported(module: str, seen: set[str]) -> set[str]:
    """Packages of others that a module of ours imports at any moment, and those that it leads to."""
    root = Path(llmtrain.__file__).parents[1]
    place = root.joinpath(*module.split("."))
    file = next((each for each in (place.with_suffix(".py"), place / "__init__.py") if each.is_file()), None)
    if module in seen or file is None:
        return set()
    seen.add(module)
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    ours = {name for name in names if name.partition(".")[0] == "llmtrain"}
    others = {name.partition(".")[0] for name in names - ours} - sys.stdlib_module_names
    return others.union(*(imported(name, seen) for name in ours))


def test_every_package_that_a_node_needs_is_asked_for() -> None:
    needed = set[str]().union(*(imported(f"llmtrain.{name}.__main__", set()) for name in ("agent", "engine")))
    assert needed - OPTIONAL == set(PACKAGES)
