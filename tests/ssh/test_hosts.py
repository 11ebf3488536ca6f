"""Lists of nodes: ranges, hostfiles, and 30 ways to write them wrongly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.backends.ssh import SshBackend
from llmtrain.cli.main import run as run_cli
from llmtrain.config.hosts import expand_entry, expand_hosts, read_hostfile
from llmtrain.config.job import resolve
from llmtrain.errors import ConfigError
from tests.support import ssh_runs
from tests.support.beds import SshBed


def names(entry: str) -> list[str]:
    hosts, problems = expand_entry(entry, "here")
    assert problems == []
    return [host.name for host in hosts]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[01-03]", ["node01", "node02", "node03"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("node[9-11]", ["node9", "node10", "node11"]),
        ("node[001,7,010-011]", ["node001", "node7", "node010", "node011"]),
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
        ("gpu[1-2].lab.example", ["gpu1.lab.example", "gpu2.lab.example"]),
        ("a,b[1-2],c", ["a", "b1", "b2", "c"]),
        (" a , b ", ["a", "b"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
        ("fe80::1", ["fe80::1"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_entries(entry: str, expected: list[str]) -> None:
    assert names(entry) == expected


def test_user_and_port() -> None:
    [one, two], problems = expand_entry("me@node[1-2]:2222", "here")
    assert not problems
    assert [(host.user, host.name, host.port) for host in (one, two)] == [
        ("me", "node1", 2222),
        ("me", "node2", 2222),
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("", "a node name is empty"),
        ("a,,b", "a node name is empty"),
        ("a,", "a node name is empty"),
        ("node[1-3", "`node[1-3`: `[` is not closed"),
        ("node1-3]", "`node1-3]`: brackets do not match"),
        ("node[[1]]", "`node[[1]]`: brackets do not match"),
        ("node[]", "`node[]`: `[]` is not a list of numbers and ranges"),
        ("node[a-c]", "`node[a-c]`: `[a-c]` is not a list of numbers and ranges"),
        ("node[1-]", "`node[1-]`: `[1-]` is not a list of numbers and ranges"),
        ("node[1,,2]", "`node[1,,2]`: `[1,,2]` is not a list of numbers and ranges"),
        ("node[1:3]", "`node[1:3]`: `3]` is not a port (1 to 65535)"),
        ("node[3-1]", "`node[3-1]`: the range 3-1 runs backwards"),
        ("node[01-100]", "`node[01-100]`: 01 and 100 differ in width"),
        ("node[1-999999999]", "`node[1-999999999]`: the range 1-999999999 holds more than 10,000 nodes"),
        ("n[1-200]m[1-200]", "`n[1-200]m[1-200]` stands for 40,000 nodes; at most 10,000 are meant"),
        ("node 1", "`node 1` is not a host name or address"),
        ("-oProxyCommand=reboot", "`-oProxyCommand=reboot` is not a host name or address"),
        ("node;reboot", "`node;reboot` is not a host name or address"),
        ("$(reboot)", "`$(reboot)` is not a host name or address"),
        ("node..x", "`node..x` is not a host name or address"),
        (".node", "`.node` is not a host name or address"),
        ("n\u00f6de", "`n\u00f6de` is not a host name or address"),
        ("x" * 64, f"`{'x' * 64}` is not a host name or address"),
        ("node:0", "`node:0`: `0` is not a port (1 to 65535)"),
        ("node:70000", "`node:70000`: `70000` is not a port (1 to 65535)"),
        ("node:ssh", "`node:ssh`: `ssh` is not a port (1 to 65535)"),
        ("node:", "`node:`: `` is not a port (1 to 65535)"),
        ("@node", "`@node`: `` is not a user name"),
        ("-l@node", "`-l@node`: `-l` is not a user name"),
        ("a b@node", "`a b@node`: `a b` is not a user name"),
        ("fe80::1::2", "`fe80::1::2` is not a host name or address"),
    ],
)
def test_wrong_entries(entry: str, message: str) -> None:
    hosts, [problem] = expand_entry(entry, "here")
    assert hosts == []
    assert (problem.where, problem.message) == ("here", message)
    assert problem.hint


def test_host_named_twice() -> None:
    hosts, [problem] = expand_hosts(["node[1-3]", "Node2"], "hosts")
    assert len(hosts) == 4
    assert problem.text() == (
        "hosts[1]: `Node2` is named twice, first at hosts[0]\n  hint: name every node once"
    )


def test_hostfile() -> None:
    text = "# ours\nnode[1-2] slots=8\n\n  me@gpu:22   # the big one\nnode3\tslots = 4\n"
    hosts, problems = read_hostfile(text, "hosts.txt")
    assert not problems
    assert [(host.name, host.user, host.port, host.slots, host.where) for host in hosts] == [
        ("node1", "", None, 8, "hosts.txt:2"),
        ("node2", "", None, 8, "hosts.txt:2"),
        ("gpu", "me", 22, None, "hosts.txt:4"),
        ("node3", "", None, 4, "hosts.txt:5"),
    ]


def test_wrong_hostfile_tells_everything_at_once() -> None:
    _, problems = read_hostfile("node1 8\nnode[2-1]\nnode3\nnode3 slots=2\nnode4 slots=x\n", "hosts.txt")
    assert [(problem.where, problem.message) for problem in problems] == [
        ("hosts.txt:1", "`8` behind `node1` is not understood"),
        ("hosts.txt:2", "`node[2-1]`: the range 2-1 runs backwards"),
        ("hosts.txt:5", "`slots=x` behind `node4` is not understood"),
        ("hosts.txt:4", "`node3` is named twice, first at hosts.txt:3"),
    ]


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_empty_hostfile(text: str) -> None:
    _, [problem] = read_hostfile(text, "hosts.txt")
    assert (problem.where, problem.message) == ("hosts.txt", "the hostfile names no node")


@given(st.text(max_size=40))
def test_any_text_ends_in_hosts_or_problems(text: str) -> None:
    hosts, problems = expand_entry(text, "here")
    assert bool(hosts) != bool(problems)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "{file}: the hostfile cannot be read: No such file or directory\n"
               "  hint: backend.ssh.hostfile names it"),
        ("", "{file}: the hostfile names no node\n  hint: one name a line, e.g. `node[01-04]`"),
        ("node[1-3]\n", "{file}: nodes = 4, but 3 are named\n  hint: set nodes to 3"),
        ("node[1-4] slots=8\n", "{file}:1: `node1` has slots=8, but gpus_per_node is 2\n"
                                "  hint: all nodes run the same number of ranks"),
        ("node1\nnode1\n", "{file}:2: `node1` is named twice, first at {file}:1\n"
                           "  hint: name every node once"),
    ],
)  # fmt: skip
def test_hostfiles_that_a_launch_refuses(home, tmp_path, text, message) -> None:
    file = tmp_path / "hosts.txt"
    if text is not None:
        file.write_text(text)
    bed = SshBed(work=tmp_path, names=("node1",), variables={}, net="")
    profile = ssh_runs.write_profile(tmp_path / "bed.yaml", bed, nodes=4)
    profile.write_text(profile.read_text().replace("hosts: ['node1']", "hostfile: hosts.txt"))
    spec = resolve("tiny", str(profile))
    with pytest.raises(ConfigError) as caught:
        SshBackend(spec.cluster)
    assert caught.value.problems[0].text() == message.format(file=file)
    assert run_cli(["launch", "tiny", "--cluster", str(profile), "--dry-run"]) == 2
