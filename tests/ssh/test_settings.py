"""OpenSSH's files as we read them: ~/.ssh/config and known_hosts."""

from __future__ import annotations

import base64
import getpass
from pathlib import Path

import pytest

from llmtrain.cli import main as cli
from llmtrain.config.hosts import Host
from llmtrain.config.ssh import SshConfig
from llmtrain.transport.base import TransportError
from llmtrain.transport.known_hosts import fingerprint, known_keys, name_in_file
from llmtrain.transport.ssh_settings import OpenSshConfig, SshSettings

KEY = base64.b64encode(b"a key").decode()


def settings(home: Path, text: str, host: Host | None = None, **options: object) -> SshSettings:
    (home / ".ssh" / "config").write_text(text)
    return OpenSshConfig(SshConfig(**options)).settings(host or Host(name="gpu1"))  # type: ignore[arg-type]


def test_defaults(home) -> None:
    found = OpenSshConfig(SshConfig()).settings(Host(name="gpu1"))
    assert (found.host, found.port, found.user) == ("gpu1", 22, getpass.getuser())
    assert found.key_name == "gpu1"
    assert [path.name for path in found.identity_files] == ["id_ed25519", "id_ecdsa", "id_rsa"]
    assert not found.chosen_key
    assert found.known_hosts[0] == home / ".ssh" / "known_hosts"
    assert found.describe() == "gpu1"


def test_first_value_counts_and_patterns_hold(home) -> None:
    text = """
    Host gpu*  !gpu9
        HostName %h.lab.example
        User=one
        Port 2201
    Host *
        User two
        IdentityFile ~/.ssh/first
        IdentityFile "~/.ssh/second"
        UserKnownHostsFile ~/.ssh/a ~/.ssh/b
        IdentitiesOnly yes
    """
    found = settings(home, text)
    assert (found.host, found.port, found.user) == ("gpu1.lab.example", 2201, "one")
    assert [path.name for path in found.identity_files] == ["first", "second"]
    assert found.identities_only
    assert found.known_hosts[:2] == (home / ".ssh" / "a", home / ".ssh" / "b")
    assert found.describe() == "gpu1 (gpu1.lab.example port 2201)"
    assert settings(home, text, Host(name="gpu9")).user == "two"


def test_entry_wins_over_profile_wins_over_file(home) -> None:
    text = "Host *\n User file\n Port 1\n IdentityFile /file\n"
    assert settings(home, text, user="profile", port=2).user == "profile"
    found = settings(home, text, Host(name="gpu1", user="entry", port=3), user="profile", port=2)
    assert (found.user, found.port) == ("entry", 3)
    found = settings(home, text, identity_file="/profile")
    assert [str(path) for path in found.identity_files] == ["/profile", "/file"]


def test_jump_hosts_are_not_logged_in_to_with_what_is_meant_for_nodes(home) -> None:
    (home / ".ssh" / "config").write_text(
        "Host bastion\n User other\n Port 7\nHost gpu1\n ProxyJump me@b:8,bastion\n"
    )
    config = OpenSshConfig(SshConfig(user="nodes", port=9, identity_file="/nodes"))
    assert config.settings(Host(name="gpu1")).jumps == ("me@b:8", "bastion")
    first, second = config.jump_settings("me@b:8"), config.jump_settings("bastion")
    assert (first.user, first.host, first.port) == ("me", "b", 8)
    assert (second.user, second.port) == ("other", 7)
    assert not second.chosen_key


def test_jump_host_that_would_jump_over_itself(home) -> None:
    (home / ".ssh" / "config").write_text("Host *\n ProxyJump bastion\n")
    config = OpenSshConfig(SshConfig())
    assert config.settings(Host(name="gpu1")).jumps == ("bastion",)
    assert config.jump_settings("bastion").jumps == ()


def test_proxy_command_and_none(home) -> None:
    found = settings(home, "Host gpu1\n ProxyCommand nc -X %% %h %p %r\n User me\n")
    assert found.proxy_command == "nc -X % gpu1 22 me"
    assert settings(home, "Host gpu1\n ProxyCommand none\nHost *\n ProxyCommand x\n").proxy_command == ""
    assert settings(home, "Host gpu1\n ProxyJump none\nHost *\n ProxyJump x\n").jumps == ()


def test_includes(home) -> None:
    folder = home / ".ssh" / "more"
    folder.mkdir()
    (folder / "a.conf").write_text("Host gpu1\n  User inner\n  Include more/b\n")
    (folder / "b").write_text("Port 77\n")
    found = settings(home, "Include more/*.conf no/such/*\nHost *\n User outer\n Port 1\n")
    assert (found.user, found.port) == ("inner", 77)


def test_match_exec(home) -> None:
    text = 'Match exec "test %h = gpu1"\n  User yes\nMatch exec false\n  Port 1\nHost *\n  User no\n'
    found = settings(home, text)
    assert (found.user, found.port) == ("yes", 22)
    assert settings(home, text, Host(name="gpu2")).user == "no"


def test_include_of_itself_ends(home) -> None:
    assert settings(home, "Include config\nHost gpu1\n  User me\n").user == "me"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Host gpu1\n  User\n", "the SSH configuration cannot be read: Unparsable line User"),
        ("Match all host gpu1\n", "the SSH configuration cannot be read: "),
    ],
)
def test_configuration_that_cannot_be_used(home, text, message) -> None:
    with pytest.raises(TransportError) as caught:
        settings(home, text)
    assert message in caught.value.text()


PROFILE = """
name: bed
nodes: 2
gpus_per_node: 4
accelerator: cpu
intra_node: {kind: shared-memory}
inter_node: {data: {kind: tcp}, control: {kind: tcp}}
storage: {path: /shared/runs, bandwidth: 500 MB/s}
backend: {kind: ssh, ssh: {hosts: ["node[1-2]"], FIELD}}
"""


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("identity_file: /", "there is no file /"),
        ("identity_file: ~nosuch/key", "~nosuch/key"),
        (f"identity_file: /{'x' * 300}", "cannot be read: File name too long"),
        ("config_file: ~nosuch/config", "~nosuch/config"),
        ("config_file: /", "there is no file /"),
    ],
)
def test_files_that_no_path_leads_to(
    field: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bed.yaml"
    file.write_text(PROFILE.replace("FIELD", field))
    assert cli.run(["launch", "tiny", "--cluster", str(file), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert f"{file}:9: backend.ssh.{field.partition(':')[0]}: " in said and words in said


# ---- known_hosts
@pytest.mark.parametrize(
    ("line", "name", "port", "known"),
    [
        ("gpu1 ssh-ed25519 {key}", "gpu1", 22, True),
        ("GPU1 ssh-ed25519 {key} a comment", "gpu1", 22, True),
        ("a,gpu1,b ssh-ed25519 {key}", "gpu1", 22, True),
        ("gpu? ssh-ed25519 {key}", "gpu1", 22, True),
        ("gpu*,!gpu1 ssh-ed25519 {key}", "gpu1", 22, False),
        ("!gpu1,gpu* ssh-ed25519 {key}", "gpu1", 22, False),
        ("gpu1 ssh-ed25519 {key}", "gpu1", 2222, False),
        ("[gpu1]:2222 ssh-ed25519 {key}", "gpu1", 2222, True),
        ("[gpu*]:2222 ssh-ed25519 {key}", "gpu1", 2222, True),
        ("[gpu1]:2222 ssh-ed25519 {key}", "gpu1", 22, False),
        ("gpu ssh-ed25519 {key}", "gpu1", 22, False),
        ("# gpu1 ssh-ed25519 {key}", "gpu1", 22, False),
        ("gpu1 ssh-ed25519 no-base64!", "gpu1", 22, False),
        ("gpu1 ssh-ed25519", "gpu1", 22, False),
        ("|1|broken|hash ssh-ed25519 {key}", "gpu1", 22, False),
        ("@cert-authority gpu1 ssh-ed25519 {key}", "gpu1", 22, False),
        ("@unknown gpu1 ssh-ed25519 {key}", "gpu1", 22, False),
    ],
)
def test_known_hosts(tmp_path, line, name, port, known) -> None:
    file = tmp_path / "known_hosts"
    file.write_text("\n" + line.format(key=KEY) + "\n")
    found = known_keys([tmp_path / "missing", file], name, port)
    assert [(key.type, key.key, key.file, key.line) for key in found.accepted] == (
        [("ssh-ed25519", b"a key", file, 2)] if known else []
    )
    assert (found.authority is not None) == line.startswith("@cert-authority")


def test_names_with_ports() -> None:
    assert name_in_file("Gpu1", 22) == "gpu1"
    assert name_in_file("Gpu1", 2222) == "[gpu1]:2222"


def test_fingerprint_is_the_one_of_ssh_keygen() -> None:
    blob = base64.b64decode("AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl")
    assert fingerprint(blob) == "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"
