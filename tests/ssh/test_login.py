"""Who is let in, and by whom: host keys, our keys, jump hosts; every refusal with its exact text and fix."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from llmtrain.config.ssh import SshConfig
from llmtrain.errors import ConfigError
from llmtrain.transport.base import TransportError
from llmtrain.transport.ssh_connect import connect
from llmtrain.transport.ssh_settings import OpenSshConfig

pytestmark = pytest.mark.e2e


def refusal(transport) -> str:
    with pytest.raises(TransportError) as caught:
        transport.connect()
    return caught.value.text()


def rewrite_config(home: Path, **changes: str | None) -> None:
    """Change settings of the bed's `Host *` block; None drops one."""
    path = home / ".ssh" / "config"
    lines = path.read_text().splitlines()
    for name, value in changes.items():
        lines = [line for line in lines if line.split()[:1] != [name]]
        if value is not None:
            lines.append(f"    {name} {value}")
    path.write_text("\n".join(lines) + "\n")


def fingerprint(bed, name: str) -> str:
    done = subprocess.run(
        ["ssh-keygen", "-lf", bed.work / "hostkeys" / f"{name}.pub"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[1]


# ---- the host's key
def test_unknown_host_key_is_refused_and_its_fix_works(to, ssh_bed, bed_home) -> None:
    rewrite_config(bed_home, UserKnownHostsFile=None)
    address, file = ssh_bed.address("node1"), bed_home / ".ssh" / "known_hosts"
    text = refusal(to("node1"))
    assert text == (
        f"the host key of node1 ({address}) is unknown: ssh-ed25519 {fingerprint(ssh_bed, 'node1')}\n"
        f"  hint: `ssh-keyscan -t ed25519 {address} >> {file}`, after comparing the fingerprint with what "
        "`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` prints on the node"
    )
    assert not file.exists()
    subprocess.run(re.search("`(.*?)`", text)[1], shell=True, check=True, stderr=subprocess.DEVNULL)
    assert to("node1").run(["hostname"], timeout=10).stdout == b"node1\n"


def test_changed_host_key_is_refused_and_its_fix_works(to, ssh_bed, bed_home, tmp_path) -> None:
    address, file = ssh_bed.address("node1"), tmp_path / "known hosts"
    other = (ssh_bed.work / "hostkeys" / "node2.pub").read_text().split()
    file.write_text(f"# comment\n{address} {other[0]} {other[1]}\n")
    rewrite_config(bed_home, UserKnownHostsFile=None)
    (bed_home / ".ssh" / "known_hosts").symlink_to(file)
    place = bed_home / ".ssh" / "known_hosts"
    text = refusal(to("node1"))
    assert text == (
        f"the host key of node1 ({address}) has changed: it is ssh-ed25519 {fingerprint(ssh_bed, 'node1')}, "
        f"but {place}:2 says {fingerprint(ssh_bed, 'node2')}\n"
        "  hint: somebody may sit between you and the node. If it was reinstalled: "
        f"`ssh-keygen -R {address} -f {place}`, then `ssh-keyscan -t ed25519 {address} >> {place}`"
    )
    for command in re.findall("`(.*?)`", text):
        subprocess.run(command, shell=True, check=True, capture_output=True)
    assert to("node1").run(["hostname"], timeout=10).stdout == b"node1\n"


def test_revoked_host_key(to, ssh_bed, bed_home) -> None:
    key = (ssh_bed.work / "hostkeys" / "node1.pub").read_text().split()
    file = bed_home / ".ssh" / "known_hosts"
    address = ssh_bed.address("node1")
    file.write_text(f"{address} {key[0]} {key[1]}\n@revoked * {key[0]} {key[1]}\n")
    rewrite_config(bed_home, UserKnownHostsFile=None)
    assert refusal(to("node1")) == (
        f"{file}:2: the host key of node1 ({address}) is revoked\n"
        "  hint: do not use this node; its administrator has to give it a new key"
    )


@pytest.mark.parametrize("form", ["hashed", "wildcard", "alias", "negated"])
def test_forms_of_known_hosts(to, ssh_bed, bed_home, form) -> None:
    key = " ".join((ssh_bed.work / "hostkeys" / "node1.pub").read_text().split()[:2])
    file, address = bed_home / ".ssh" / "known_hosts", ssh_bed.address("node1")
    names = {"wildcard": "10.77.*", "alias": "gpu-one", "negated": f"10.77.*,!{address}"}
    file.write_text(f"{names.get(form, address)} {key}\n")
    if form == "hashed":
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
        assert file.read_text().startswith("|1|")
    rewrite_config(bed_home, UserKnownHostsFile=None, HostKeyAlias="gpu-one" if form == "alias" else None)
    if form == "negated":
        assert "is unknown" in refusal(to("node1"))
    else:
        assert to("node1").run(["hostname"], timeout=10).stdout == b"node1\n"


# ---- our keys
def test_key_that_the_node_does_not_accept(to, ssh_bed, bed_home) -> None:
    key = bed_home / ".ssh" / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    rewrite_config(bed_home, IdentityFile=None, IdentitiesOnly=None)
    address = ssh_bed.address("node1")
    assert refusal(to("node1")) == (
        f"node1 ({address}) refuses user `root` with {key}\n"
        f"  hint: `ssh-copy-id -i {key}.pub root@{address}`, or another user with backend.ssh.user"
    )


def test_no_key_at_all(to, ssh_bed, bed_home) -> None:
    rewrite_config(bed_home, IdentityFile=None)
    address = ssh_bed.address("node1")
    assert refusal(to("node1", user="someone")) == (
        f"no key to log in to node1 ({address}) with\n"
        f"  hint: `ssh-keygen -t ed25519`, then `ssh-copy-id someone@{address}`"
    )


def test_identity_file_that_does_not_exist(to, ssh_bed, bed_home) -> None:
    rewrite_config(bed_home, IdentityFile=None)
    assert refusal(to("node1", identity_file="/no/such/key")) == (
        f"no key to log in to node1 ({ssh_bed.address('node1')}) with (/no/such/key does not exist)\n"
        "  hint: backend.ssh.identity_file or IdentityFile in ~/.ssh/config has to name a private key"
    )


def test_key_with_a_passphrase_is_named_and_works_through_the_agent(
    to, ssh_bed, bed_home, monkeypatch
) -> None:
    key = bed_home / "locked"
    shutil.copy(ssh_bed.key, key)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", key], check=True, capture_output=True)
    rewrite_config(bed_home, IdentityFile=str(key))
    address = ssh_bed.address("node1")
    assert refusal(to("node1")) == (
        f"no key to log in to node1 ({address}) with ({key} is locked with a passphrase)\n"
        f"  hint: `ssh-add {key}` (needs a running ssh-agent)"
    )
    door = bed_home / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", door], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(door))
        while not door.exists():
            time.sleep(0.02)
        subprocess.run(["ssh-add", "-q", ssh_bed.key], check=True, capture_output=True)
        rewrite_config(bed_home, IdentitiesOnly=None)
        assert to("node1").run(["hostname"], timeout=10).stdout == b"node1\n"
    finally:
        agent.kill()
        agent.wait()


def test_node_that_takes_no_keys(to, ssh_bed) -> None:
    settings = ssh_bed.work / "nodes" / "node4" / "sshd_config"
    before = settings.read_text()
    with_passwords = before.replace("PasswordAuthentication no", "PasswordAuthentication yes")
    try:
        ssh_bed.fault("sshd-stop", "node4")
        settings.write_text(with_passwords + "PubkeyAuthentication no\n")
        ssh_bed.restore()
        assert refusal(to("node4")) == (
            f"node4 ({ssh_bed.address('node4')}) takes no keys, only password\n"
            "  hint: PubkeyAuthentication yes in the node's sshd_config"
        )
    finally:
        settings.write_text(before)
        ssh_bed.fault("sshd-stop", "node4")
        ssh_bed.restore()


# ---- the way there
def test_refused_connection_is_tried_again_then_named(to, ssh_bed) -> None:
    ssh_bed.fault("sshd-stop", "node2")
    began = time.monotonic()
    assert refusal(to("node2", retries=2)) == (
        f"node2: {ssh_bed.address('node2')} port 22 refuses connections\n"
        "  hint: is sshd running there? `systemctl status ssh`; another port: backend.ssh.port"
    )
    assert 1.0 < time.monotonic() - began < 4, "pauses of about 0.5 and 1 s"


def test_node_that_comes_up_meanwhile_is_taken(to, ssh_bed) -> None:
    ssh_bed.fault("sshd-stop", "node2")
    threading.Timer(0.7, ssh_bed.restore).start()
    assert to("node2").run(["hostname"], timeout=10).stdout == b"node2\n"


def test_silent_node_is_given_up_after_one_time_out(to, ssh_bed) -> None:
    ssh_bed.fault("cut", "node2")
    began = time.monotonic()
    assert refusal(to("node2", connect_timeout=1.0)) == (
        f"node2: no answer from {ssh_bed.address('node2')} port 22 within 1 s\n"
        f"  hint: is the node up? `ping -c 1 {ssh_bed.address('node2')}`; slower networks: "
        "backend.ssh.connect_timeout"
    )
    assert time.monotonic() - began < 3


def test_frozen_sshd_is_given_up(to, ssh_bed) -> None:
    ssh_bed.fault("freeze", "node2")
    assert refusal(to("node2", connect_timeout=1.0)) == (
        f"node2 ({ssh_bed.address('node2')}) accepts connections but does not speak SSH within 1 s\n"
        "  hint: the node may be overloaded or hung; or backend.ssh.connect_timeout is too short"
    )


def test_name_that_does_not_resolve(to, monkeypatch) -> None:
    def nobody(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    assert refusal(to("no-such-host.invalid")) == (
        "no-such-host.invalid: the name `no-such-host.invalid` cannot be resolved here\n"
        "  hint: `HostName ADDRESS` below `Host no-such-host.invalid` in ~/.ssh/config, or an address instead"
    )


def test_something_else_on_the_port(to, ssh_bed) -> None:
    code = "import socket; s = socket.create_server(('', 2222)); [s.accept()[0].close() for _ in range(9)]"
    server = threading.Thread(
        target=ssh_bed.run, args=("node1", "timeout", "30", "python3", "-c", code), kwargs={"check": False}
    )
    server.start()
    while ":2222 " not in ssh_bed.run("node1", "ss", "-Hltn"):
        time.sleep(0.1)
    text = refusal(to("node1", port=2222, retries=0))
    assert text.startswith(
        f"node1 ({ssh_bed.address('node1')} port 2222) dropped the connection while it was"
    )
    ssh_bed.run("node1", "pkill", "-f", "create_server", check=False)
    server.join()


@pytest.mark.parametrize("way", ["ProxyJump", "ProxyJump chain", "ProxyCommand"])
def test_way_through_other_hosts(to, ssh_bed, bed_home, way) -> None:
    ways = {
        "ProxyJump": "ProxyJump node1",
        "ProxyJump chain": "ProxyJump root@node1,node2",
        "ProxyCommand": f"ProxyCommand ssh -F {ssh_bed.ssh_config} -W %h:%p %r@node1 2>/dev/null",
    }
    config = bed_home / ".ssh" / "config"
    config.write_text(f"Host node3\n    {ways[way]}\n{config.read_text()}")
    done = to("node3").run(["sh", "-c", "hostname; echo $SSH_CONNECTION"], timeout=20)
    name, connection = done.stdout.decode().splitlines()
    last = "node2" if "chain" in way else "node1"
    assert (name, connection.split()[0]) == ("node3", ssh_bed.address(last))


def test_lost_node_behind_a_jump_host_is_noticed(to, ssh_bed, bed_home, tmp_path) -> None:
    """The TCP connection of ours ends at the jump host, which lives."""
    config = bed_home / ".ssh" / "config"
    config.write_text(f"Host node3\n    ProxyJump node1\n{config.read_text()}")
    ended = threading.Event()
    channel = to("node3").open(
        ["cat"], on_line=lambda line: line is None and ended.set(), stderr=tmp_path / "log", environment={}
    )
    assert channel.send(b"up")
    ssh_bed.fault("cut", "node3")
    assert ended.wait(10)


def test_jump_host_that_does_not_reach_the_node(to, ssh_bed, bed_home) -> None:
    config = bed_home / ".ssh" / "config"
    config.write_text(f"Host node3\n    ProxyJump node1\n    Port 2200\n{config.read_text()}")
    text = refusal(to("node3", retries=0))
    assert text.startswith(
        f"node3: node1 ({ssh_bed.address('node1')}) does not reach {ssh_bed.address('node3')} port 2200: "
    )


def test_proxy_command_that_fails(to, bed_home) -> None:
    config = bed_home / ".ssh" / "config"
    config.write_text(f"Host node3\n    ProxyCommand false\n{config.read_text()}")
    began = time.monotonic()
    assert "dropped the connection while it was set up" in refusal(to("node3", retries=0))
    assert time.monotonic() - began < 3


def test_included_configuration_is_read(to, ssh_bed, bed_home) -> None:
    folder = bed_home / ".ssh" / "config.d"
    folder.mkdir()
    (bed_home / ".ssh" / "config").rename(folder / "bed.conf")
    (bed_home / ".ssh" / "config").write_text(
        f"Include config.d/*.conf\nHost gpu\n  HostName {ssh_bed.address('node2')}\n"
    )
    assert to("node1").run(["hostname"], timeout=10).stdout == b"node1\n"


def test_chosen_configuration_stands_alone(home, ssh_bed) -> None:
    config = OpenSshConfig(SshConfig(config_file=str(ssh_bed.ssh_config)))
    from llmtrain.config.hosts import Host

    connection = connect(config.settings(Host(name="node4")), config)
    connection.close()
    with pytest.raises(ConfigError, match="there is no file /no/such/config"):
        OpenSshConfig(SshConfig(config_file="/no/such/config"))
