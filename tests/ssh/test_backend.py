"""The SSH backend looks at real nodes: what is fit, what is not, and what a person reads then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtrain import __version__
from llmtrain.backends.ssh import SshBackend
from llmtrain.cli.launch import _fit_backend
from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.errors import ConfigError, LlmtrainError
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from tests.support import ssh_runs
from tests.support.beds import SshBed

pytestmark = pytest.mark.e2e

Look = Callable[..., list[str]]


@pytest.fixture
def look(bed_home: Path, ssh_bed: SshBed, tmp_path: Path) -> Iterator[Look]:
    """`look("some.override=1", nodes=3)`: names and addresses of the nodes that are fit."""
    run = RunDir(tmp_path / "runs" / "run")
    run.path.mkdir(parents=True)

    def look_at(*overrides: str, **options: object) -> list[str]:
        profile = ssh_runs.write_profile(tmp_path / "bed.yaml", ssh_bed, **options)  # type: ignore[arg-type]
        spec = resolve("tiny", str(profile), overrides)
        backend = SshBackend(spec.cluster)
        assert list(backend.check(spec, run)) == []
        return [f"{node.name} {node.address} {dict(node.environment)}" for node in backend.nodes(spec, run)]

    yield look_at
    assert sorted(run.path.parent.rglob("*")) == [run.path], "nothing may be left in the shared folder"


def problems(look: Look, *overrides: str, **options: object) -> list[str]:
    with pytest.raises(LlmtrainError) as caught:
        look(*overrides, **options)
    assert caught.value.exit_status == (2 if isinstance(caught.value, ConfigError) else 1)
    return [problem.text() for problem in caught.value.problems]


def test_fit_nodes(look, ssh_bed) -> None:
    interfaces = {f"{kind}_SOCKET_IFNAME": "eth0" for kind in ("GLOO", "NCCL", "TP")}
    expected = [f"node{index} {ssh_bed.address(f'node{index}')} {interfaces}" for index in (1, 2, 3, 4)]
    assert look() == expected
    assert look("cluster.inter_node.interface=eth0") == expected


def test_silent_node_is_named_and_not_waited_for(look, ssh_bed) -> None:
    ssh_bed.fault("cut", "node2")
    began = time.monotonic()
    assert problems(look) == [
        f"node2: no answer from {ssh_bed.address('node2')} port 22 within 3 s\n"
        f"  hint: is the node up? `ping -c 1 {ssh_bed.address('node2')}`; slower networks: "
        "backend.ssh.connect_timeout",
        "3 of 4 nodes are fit to start, 4 are needed",
    ]
    assert time.monotonic() - began < 8.0


def test_all_broken_nodes_are_named_at_once(look, ssh_bed) -> None:
    ssh_bed.fault("sshd-stop", "node1")
    ssh_bed.fault("freeze", "node4")
    found = problems(look, "cluster.backend.ssh.hosts=[node1, node2, nowhere-of-ours, node4]")
    assert [text.split(": ")[0].split(" ")[0] for text in found] == ["node1", "nowhere-of-ours", "node4", "1"]


def test_broken_node_is_left_out_when_there_is_a_spare(look, ssh_bed, caplog) -> None:
    ssh_bed.fault("sshd-stop", "node2")
    assert [line.split()[0] for line in look(nodes=5, spares=1)] == ["node1", "node3", "node4", "node5"]
    assert f"left out: node2: {ssh_bed.address('node2')} port 22 refuses connections" in caplog.text


def test_launch_needs_the_nodes_of_its_layout_only(bed_home, ssh_bed, tmp_path, caplog) -> None:
    profile = ssh_runs.write_profile(tmp_path / "bed.yaml", ssh_bed)
    spec, run = resolve("tiny", str(profile)), RunDir(tmp_path / "runs" / "run")
    ssh_bed.fault("sshd-stop", "node2")
    _fit_backend(JobFile(run_id="r", version=__version__, spec=spec, layout=Layout(dp=6)), run)
    assert "left out: node2" in caplog.text
    with pytest.raises(LlmtrainError) as caught:
        _fit_backend(JobFile(run_id="r", version=__version__, spec=spec, layout=Layout(dp=8)), run)
    # There is no run yet that could be resumed with fewer.
    assert caught.value.problems[-1].text() == "3 of 4 nodes are fit to start, 4 are needed"


def test_unknown_host_key(look, ssh_bed, bed_home) -> None:
    known = [line for line in ssh_bed.known_hosts.read_text().splitlines() if not line.startswith("node3,")]
    (bed_home / "known").write_text("\n".join(known) + "\n")
    config = bed_home / ".ssh" / "config"
    config.write_text(f"UserKnownHostsFile {bed_home}/known\n{config.read_text()}")
    found = problems(look)
    assert found[0].startswith(f"the host key of node3 ({ssh_bed.address('node3')}) is unknown: ssh-ed25519 ")
    assert found[1:] == ["3 of 4 nodes are fit to start, 4 are needed"]


def test_missing_python(look) -> None:
    found = problems(look, python="/no/such/python")
    assert found[:-1] == [
        f"node{index}: `/no/such/python` is not there\n"
        "  hint: an interpreter that has llmtrain on every node: backend.python"
        for index in (1, 2, 3, 4)
    ]


def test_python_that_is_none(look) -> None:
    assert problems(look, python="/bin/true")[0] == (
        "node1: `/bin/true` does not run: exit code 0\n"
        "  hint: an interpreter that has llmtrain on every node: backend.python"
    )


def interpreter(tmp_path: Path, node: str, line: str) -> str:
    """A python that is another one on a single node."""
    path = tmp_path / "python"
    path.write_text(
        f'#!/bin/sh\nif [ "$(hostname)" = {node} ]; then {line}; fi\nexec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_python_without_llmtrain_on_one_node(look, tmp_path) -> None:
    python = interpreter(tmp_path, "node3", f'exec {sys.executable} -S -I "$@"')
    [first, second, *_] = problems(look, python=python)
    assert first.startswith(f"node3: {sys.executable} has no llmtrain (ModuleNotFoundError: ")
    assert second.startswith(f"node3: {sys.executable} has no torch\n")


def test_other_torch_on_one_node(look, tmp_path) -> None:
    from importlib.metadata import version

    folder = tmp_path / "site" / "torch-2.12.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n")
    python = interpreter(tmp_path, "node2", f"export PYTHONPATH={folder.parent}")
    assert problems(look, python=python)[0] == (
        f"node2: torch 2.12.0 is installed, most nodes have {version('torch')}\n"
        f"  hint: `{sys.executable} -m pip install torch=={version('torch')}` on node2"
    )


def test_other_llmtrain_on_one_node(look, tmp_path) -> None:
    folder = tmp_path / "site" / "llmtrain"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text('__version__ = "0.0.1"\n')
    python = interpreter(tmp_path, "node2", f"export PYTHONPATH={folder.parent}")
    assert problems(look, python=python)[0].startswith(
        f"node2: llmtrain 0.0.1 is installed, here it is {__version__}\n"
    )


def test_two_nodes_with_one_name(look, ssh_bed) -> None:
    ssh_bed.run("node3", "hostname", "node1")
    try:
        found = problems(look)
    finally:
        ssh_bed.run("node3", "hostname", "node3")
    # On a bed all nodes are of one boot and differ by their name only.
    assert found[0] == (
        "node3: node1 and node3 are one machine, which calls itself `node1`\n"
        "  hint: name every machine once in backend.ssh.hosts"
    )


def test_one_node_under_two_names(look, ssh_bed, bed_home) -> None:
    config = bed_home / ".ssh" / "config"
    config.write_text(
        f"Host gpu\n    HostName {ssh_bed.address('node1')}\n    User root\n"
        f"    IdentityFile {ssh_bed.key}\n    UserKnownHostsFile {ssh_bed.known_hosts}\n{config.read_text()}"
    )
    found = problems(look, "cluster.backend.ssh.hosts=[node1, node2, node3, gpu]")
    assert found[0].startswith("gpu: node1 and gpu are one machine, which calls itself `node1`\n")


def test_folder_that_is_not_shared(look, ssh_bed, tmp_path) -> None:
    ssh_bed.run("node4", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "runs"))
    try:
        [text, _] = problems(look)
    finally:
        ssh_bed.run("node4", "umount", str(tmp_path / "runs"))
    assert text == (
        f"node4: {tmp_path}/runs is not the same folder there as here\n"
        "  hint: checkpoints need a folder that all nodes and this machine share (storage.path); if only the "
        "nodes share it: storage.shared: nodes"
    )


def test_folder_that_may_not_be_written_there(look, ssh_bed, tmp_path) -> None:
    ssh_bed.run("node4", "mount", "--bind", "-o", "ro", str(tmp_path / "runs"), str(tmp_path / "runs"))
    try:
        [text, _] = problems(look)
    finally:
        ssh_bed.run("node4", "umount", str(tmp_path / "runs"))
    assert text.startswith(f"node4: user `root` may not write to {tmp_path}/runs\n")


def test_interface_that_a_node_lacks(look) -> None:
    assert problems(look, "cluster.inter_node.interface=ib0")[0] == (
        "node1: there is no interface ib0 with an IPv4 address; there are: eth0, lo\n"
        "  hint: inter_node.interface names an interface that every node has"
    )


def test_full_disk(bed_home, ssh_bed, tmp_path) -> None:
    small = tmp_path / "runs"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", small], check=True)
    try:
        (small / "filler").write_bytes(b"x" * 4096)
        spec = resolve("tiny", str(ssh_runs.write_profile(tmp_path / "bed.yaml", ssh_bed)))
        with pytest.raises(LlmtrainError) as caught:
            SshBackend(spec.cluster).check(spec, RunDir(small / "run"))
    finally:
        subprocess.run(["umount", small], check=True)
    assert caught.value.text() == (
        f"{small}: cannot be written here: no space left on device\n"
        "  hint: storage.path or --run-dir names it"
    )


def test_hostfile(bed_home, ssh_bed, tmp_path) -> None:
    (tmp_path / "hosts.txt").write_text("node4 slots=2\nnode[1-3]\n")
    profile = ssh_runs.write_profile(tmp_path / "bed.yaml", ssh_bed, nodes=4)
    hosts = f"hosts: {list(ssh_bed.names[:4])}"
    assert hosts in profile.read_text()
    profile.write_text(profile.read_text().replace(hosts, "hostfile: hosts.txt"))
    spec = resolve("tiny", str(profile))
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    nodes = SshBackend(spec.cluster).nodes(spec, run)
    assert [node.name for node in nodes] == ["node4", "node1", "node2", "node3"]


def test_nodes_that_come_back_are_found_in_bounded_time(bed_home, ssh_bed, tmp_path) -> None:
    profile = ssh_runs.write_profile(tmp_path / "bed.yaml", ssh_bed, nodes=4)
    spec, run = resolve("tiny", str(profile)), RunDir(tmp_path / "run")
    run.path.mkdir()
    backend = SshBackend(spec.cluster)
    ssh_bed.fault("cut", "node2")
    assert [node.name for node in backend.nodes(spec, run, fewest=3)] == ["node1", "node3", "node4"]
    began = time.monotonic()
    assert not backend.look_at(["node2"], spec, run, seconds=4.0)
    assert time.monotonic() - began < 6.0
    ssh_bed.restore()
    [node] = backend.look_at(["node2", "elsewhere"], spec, run, seconds=10.0)
    assert (node.name, node.address) == ("node2", ssh_bed.address("node2"))
    assert node.environment["GLOO_SOCKET_IFNAME"] == "eth0"


# ---- the command line
@pytest.mark.parametrize(
    ("override", "status", "text"),
    [
        ("cluster.backend.ssh.hosts=['node[4-1]']", 2, "`node[4-1]`: the range 4-1 runs backwards"),
        ("cluster.backend.ssh.hosts=[node1, node2]", 2, "nodes = 4, but backend.ssh.hosts names 2"),
        ("cluster.backend.ssh.port=70000", 2, "backend.ssh.port must be"),
        ("cluster.backend.ssh.retries=4", 2, "backend.ssh.retries must be"),
        ("cluster.backend.ssh.user='a b'", 2, "`a b` is not a user name"),
        ("cluster.backend.ssh.connect_timeout=0", 2, "backend.ssh.connect_timeout must be"),
        ("cluster.backend.ssh.config_file=/no/such", 2, "there is no file /no/such"),
        ("cluster.backend.ssh.port=2222", 1, "port 2222 refuses connections"),
        ("cluster.backend.python=python3", 2, "backend.python = `python3` is not an absolute path"),
        ("cluster.backend.python=/no/such", 1, "node1: `/no/such` is not there"),
        ("cluster.storage.path=runs", 2, "must be absolute with backend.kind = ssh"),
        ("cluster.storage.path=/proc/runs", 1, "/proc/runs: cannot be written here"),
        ("cluster.inter_node.interface=ib0", 1, "there is no interface ib0"),
    ],
)
def test_exit_codes_of_launch(bed_home, ssh_bed, tmp_path, override, status, text) -> None:
    profile = ssh_runs.write_profile(tmp_path / "bed.yaml", ssh_bed)
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", "launch", "tiny", "--cluster", profile, "--set", override],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200"},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
