"""What OpenSSH's configuration files say about a host: the user's own `ssh NODE` and ours go the same way."""

from __future__ import annotations

import getpass
import io
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Any

from llmtrain.config.hosts import Host
from llmtrain.config.ssh import USER_CONFIG, SshConfig
from llmtrain.errors import ConfigError, Problem
from llmtrain.transport.base import TransportError

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
USER_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
MATCH_SECONDS = 10.0
"""Longest a command of `Match exec` may take; one that does not end does not match."""
INCLUDE_DEPTH = 16
"""As deep as OpenSSH follows includes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSettings:
    """How to reach one host."""

    name: str
    """As people call the node."""
    host: str
    """Name or address to connect to."""
    port: int
    user: str
    key_name: str
    """What known_hosts files call it."""
    identity_files: tuple[Path, ...]
    """Private keys to offer, in order."""
    identities_only: bool
    """Whether the agent may offer only those."""
    chosen_key: bool
    """Whether somebody chose the keys; otherwise they are the usual places, which may be empty."""
    jumps: tuple[str, ...] = ()
    """ProxyJump: hosts to go through, nearest first."""
    proxy_command: str = ""
    known_hosts: tuple[Path, ...] = ()
    """The user's files first; the first of them is where a new key belongs."""
    options: SshConfig = field(default_factory=SshConfig)

    def describe(self) -> str:
        """`node3`, with the address where it differs."""
        address = self.host if self.port == 22 else f"{self.host} port {self.port}"
        return self.name if address == self.name else f"{self.name} ({address})"


class OpenSshConfig:
    """The user's configuration file, then the system's, as OpenSSH reads them."""

    def __init__(self, options: SshConfig) -> None:
        self.options = options
        self._parsed = _parse(options.config_file)

    def settings(self, host: Host) -> SshSettings:
        """Settings of a host; raises TransportError for a configuration that cannot be used."""
        found = self._lookup(host.name)
        keys = self._identity_files(found)
        user = host.user or self.options.user or found.get("user") or getpass.getuser()
        jump = found.get("proxyjump", "")
        return SshSettings(
            name=host.name,
            host=found["hostname"],
            port=host.port or self.options.port or int(found.get("port", 22)),
            user=user,
            key_name=found.get("hostkeyalias", found["hostname"]),
            identity_files=keys or tuple(Path(key).expanduser() for key in DEFAULT_KEYS),
            identities_only=found.get("identitiesonly", "no").lower() == "yes",
            chosen_key=bool(keys),
            jumps=tuple(jump.split(",")) if jump.lower() not in ("", "none") else (),
            proxy_command=_proxy_command(found, user),
            known_hosts=_known_hosts(found),
            options=self.options,
        )

    def jump_settings(self, jump: str) -> SshSettings:
        """Settings of a ProxyJump entry, `[user@]host[:port]`; the profile's own user, port and key are not
        meant for it."""
        user, _, rest = jump.strip().removeprefix("ssh://").rpartition("@")
        name, _, port = rest.partition(":") if rest.count(":") == 1 else (rest, "", "")
        plain = SshConfig(
            config_file=self.options.config_file,
            connect_timeout=self.options.connect_timeout,
            retries=self.options.retries,
        )
        other = OpenSshConfig.__new__(OpenSshConfig)
        other.options, other._parsed = plain, self._parsed
        found = other.settings(Host(name=name, user=user, port=int(port) if port.isdigit() else None))
        # `Host *` with a ProxyJump is meant for everything behind the jump host.
        own = any(hop.rpartition("@")[2].partition(":")[0] == name for hop in found.jumps)
        return replace(found, jumps=()) if own else found

    def _lookup(self, name: str) -> dict[str, Any]:
        import paramiko

        try:
            found: dict[str, Any] = dict(self._parsed.lookup(name))
        except (paramiko.SSHException, ImportError, ValueError, OSError) as error:
            raise TransportError(
                f"{name}: the SSH configuration cannot be used: {error}",
                where=self.options.config_file,
                hint="`ssh -G` shows what OpenSSH makes of it",
            ) from error
        return found

    def _identity_files(self, found: dict[str, Any]) -> tuple[Path, ...]:
        own = [self.options.identity_file] if self.options.identity_file else []
        return tuple(Path(key).expanduser() for key in [*own, *found.get("identityfile", [])])


class _MatchExec:
    """Runs the commands of `Match exec` for paramiko, whose own way needs a further package and reads our
    standard input meanwhile."""

    ok = False

    def run(self, command: str, **options: object) -> _MatchExec:
        """Whether a command of the user's configuration succeeds; it is a shell line there too."""
        result = _MatchExec()
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                ["/bin/sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=MATCH_SECONDS,
                check=False,
            )
            result.ok = done.returncode == 0
        return result


def _parse(user_config: str) -> Any:
    import paramiko

    setattr(paramiko.config, "invoke", _MatchExec())  # noqa: B010 - not among its declared names
    config = paramiko.SSHConfig()
    user = Path(user_config).expanduser()
    chosen = user_config != USER_CONFIG
    if chosen and not user.is_file():
        message = f"there is no file {user}"
        raise ConfigError([Problem("backend.ssh.config_file", message, "name one that `ssh -F` takes")])
    # As with `ssh -F`, a file that somebody chose stands alone.
    for path in (user,) if chosen else (user, SYSTEM_CONFIG):
        if path.is_file():
            try:
                config.parse(io.StringIO("\n".join(_lines(path, path.parent, 0))))
            except (paramiko.SSHException, UnicodeDecodeError, OSError) as error:
                raise TransportError(
                    f"the SSH configuration cannot be read: {error}", where=str(path)
                ) from error
    return config


def _lines(path: Path, folder: Path, depth: int) -> Iterator[str]:
    """Lines of a configuration with its `Include` lines replaced by what they name."""
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.replace("=", " ", 1).split()
        if not words or words[0].lower() != "include":
            yield line
            continue
        for pattern in words[1:] if depth < INCLUDE_DEPTH else ():
            place = Path(pattern.strip('"')).expanduser()
            for name in sorted(glob(str(folder / place))):  # noqa: PTH207 - Path.glob wants a root
                yield from _lines(Path(name), folder, depth + 1)


def _proxy_command(found: dict[str, Any], user: str) -> str:
    """The command with the tokens that paramiko leaves alone; paramiko has done %h and %p."""
    command = str(found.get("proxycommand") or "")
    if command.lower() == "none":
        return ""
    return command.replace("%r", user).replace("%%", "%")


def _known_hosts(found: dict[str, Any]) -> tuple[Path, ...]:
    user = str(found.get("userknownhostsfile", "")).split() or USER_KNOWN_HOSTS
    system = str(found.get("globalknownhostsfile", "")).split() or SYSTEM_KNOWN_HOSTS
    names = [name for name in (*user, *system) if name.lower() != "none"]
    return tuple(Path(name.strip('"')).expanduser() for name in names)
