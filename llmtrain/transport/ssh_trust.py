"""Who is at the other end, and who we are: host keys are checked against known_hosts, then keys are offered.

Nothing is ever asked of a person here, and nothing is written: an unknown host key ends in an error that
carries the line which makes it known.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import paramiko

from llmtrain.transport.base import TransportError
from llmtrain.transport.known_hosts import KnownKeys, fingerprint, known_keys, name_in_file
from llmtrain.transport.ssh_settings import SshSettings

RSA_ALGORITHMS = ("rsa-sha2-512", "rsa-sha2-256")
"""Signature algorithms of a host key that known_hosts lists as `ssh-rsa`."""
HOST_KEY_FILES = {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}
"""Key type -> the part of its file's name below /etc/ssh; all others are ecdsa."""


class UntrustedHostError(TransportError):
    """The host key is unknown, has changed or was revoked."""


class AuthenticationError(TransportError):
    """The node accepts none of our keys."""


# ---- the host's key
def prefer_known_types(transport: paramiko.Transport, keys: KnownKeys) -> None:
    """Ask first for host keys of the types that known_hosts holds, as OpenSSH does: a host has several."""
    wanted: list[str] = []
    for kind in keys.types:
        wanted += RSA_ALGORITHMS if kind == "ssh-rsa" else (kind,)
    options = transport.get_security_options()
    offered = tuple(options.key_types)
    known = [kind for kind in wanted if kind in offered]
    options.key_types = (*known, *(kind for kind in offered if kind not in known))


def keys_of(settings: SshSettings) -> KnownKeys:
    """What known_hosts says about a host."""
    return known_keys(settings.known_hosts, settings.key_name, settings.port)


def check_host_key(settings: SshSettings, keys: KnownKeys, shown: paramiko.PKey) -> None:
    """Raise UntrustedHostError unless known_hosts vouches for the key that the host has proven to own."""
    key = shown.asbytes()
    for revoked in keys.revoked:
        if revoked.key == key:
            raise UntrustedHostError(
                f"the host key of {settings.describe()} is revoked",
                where=f"{revoked.file}:{revoked.line}",
                hint="do not use this node; its administrator has to give it a new key",
            )
    if any(known.key == key for known in keys.accepted):
        return
    kind, print_ = shown.get_name(), fingerprint(key)
    same_type = next((known for known in keys.accepted if known.type == kind), None)
    if same_type is not None:
        name = shlex.quote(name_in_file(settings.key_name, settings.port))
        raise UntrustedHostError(
            f"the host key of {settings.describe()} has changed: it is {kind} {print_}, "
            f"but {same_type.file}:{same_type.line} says {fingerprint(same_type.key)}",
            hint="somebody may sit between you and the node. If it was reinstalled: "
            f"`ssh-keygen -R {name} -f {shlex.quote(str(same_type.file))}`, then `{_learn(settings, kind)}`",
        )
    note = ""
    if keys.authority is not None:
        note = (
            f"; {keys.authority.file}:{keys.authority.line} names a certificate authority, "
            "which is not supported here"
        )
    files = HOST_KEY_FILES.get(kind, "ecdsa")
    raise UntrustedHostError(
        f"the host key of {settings.describe()} is unknown: {kind} {print_}{note}",
        hint=f"`{_learn(settings, kind)}`, after comparing the fingerprint with what "
        f"`ssh-keygen -lf /etc/ssh/ssh_host_{files}_key.pub` prints on the node",
    )


def _learn(settings: SshSettings, kind: str) -> str:
    """The command that makes a host key known."""
    if settings.jumps or settings.proxy_command:
        return f"ssh {shlex.quote(settings.name)} true"
    port = f"-p {settings.port} " if settings.port != 22 else ""
    kind = {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}.get(kind, "ecdsa")
    line = f"ssh-keyscan -t {kind} {port}{shlex.quote(settings.host)}"
    if settings.key_name != settings.host:
        line += f" | sed 's/^[^ ]*/{name_in_file(settings.key_name, settings.port)}/'"
    return f"{line} >> {shlex.quote(str(settings.known_hosts[0]))}" if settings.known_hosts else line


# ---- our keys
@dataclass(slots=True)
class _Tried:
    """What was offered, for the error."""

    offered: list[str] = field(default_factory=list)
    locked: list[Path] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def authenticate(transport: paramiko.Transport, settings: SshSettings) -> None:
    """Offer the agent's keys, then key files, until one is accepted; raises AuthenticationError."""
    tried = _Tried()
    for name, key in _keys(settings, tried):
        tried.offered.append(name)
        try:
            further = transport.auth_publickey(settings.user, key)
        except paramiko.BadAuthenticationType as error:
            raise AuthenticationError(
                f"{settings.describe()} takes no keys, only {', '.join(error.allowed_types)}",
                hint="PubkeyAuthentication yes in the node's sshd_config",
            ) from error
        except paramiko.AuthenticationException:
            if transport.is_active():
                continue
            break
        if further:
            raise AuthenticationError(
                f"{settings.describe()} wants more than a key: {', '.join(further)}",
                hint="a login that a person has to complete cannot be used; ask for keys alone between nodes",
            )
        return
    raise _refused(settings, tried, cut_off=not transport.is_active())


def _keys(settings: SshSettings, tried: _Tried) -> Iterator[tuple[str, paramiko.PKey]]:
    wanted = set(_public_keys(settings.identity_files)) if settings.identities_only else None
    from_agent: set[bytes] = set()
    for key in _agent_keys():
        if wanted is None or key.asbytes() in wanted:
            from_agent.add(key.asbytes())
            yield f"the agent's {key.get_name()} {fingerprint(key.asbytes())}", key
    for path in settings.identity_files:
        if not path.is_file():
            if settings.chosen_key:
                tried.broken.append(f"{path} does not exist")
            continue
        if from_agent & set(_public_keys([path])):
            continue
        try:
            yield str(path), paramiko.PKey.from_path(path)
        except paramiko.PasswordRequiredException:
            tried.locked.append(path)
        except (paramiko.SSHException, ValueError, TypeError, OSError) as error:
            # The library underneath says TypeError for a key that needs a passphrase.
            if "password" in str(error).lower() or "passphrase" in str(error).lower():
                tried.locked.append(path)
            else:
                tried.broken.append(f"{path} cannot be read: {error}")


def _agent_keys() -> tuple[paramiko.AgentKey, ...]:
    with suppress(paramiko.SSHException, OSError):
        return tuple(paramiko.Agent().get_keys())
    return ()


def _public_keys(paths: tuple[Path, ...] | list[Path]) -> Iterator[bytes]:
    """Public halves that lie beside private keys."""
    import base64

    for path in paths:
        with suppress(OSError, ValueError, IndexError):
            text = path.with_name(path.name + ".pub").read_text(encoding="utf-8")
            yield base64.b64decode(text.split()[1])


def _refused(settings: SshSettings, tried: _Tried, *, cut_off: bool) -> AuthenticationError:
    target = f"{settings.user}@{settings.host}"
    port = f"-p {settings.port} " if settings.port != 22 else ""
    notes = [f"{path} is locked with a passphrase" for path in tried.locked] + tried.broken
    also = f" ({'; '.join(notes)})" if notes else ""
    if tried.offered:
        message = (
            f"{settings.describe()} refuses user `{settings.user}` with {', '.join(tried.offered)}{also}"
        )
    else:
        message = f"no key to log in to {settings.describe()} with{also}"
    if cut_off and len(tried.offered) > 1:
        hint = "too many keys were offered: `IdentitiesOnly yes` and the right IdentityFile in ~/.ssh/config"
    elif tried.locked:
        hint = f"`ssh-add {shlex.quote(str(tried.locked[0]))}` (needs a running ssh-agent)"
    elif tried.offered or any(path.is_file() for path in settings.identity_files):
        key = next((path for path in settings.identity_files if path.is_file()), None)
        chosen = f"-i {shlex.quote(f'{key}.pub')} " if key else ""
        hint = f"`ssh-copy-id {chosen}{port}{shlex.quote(target)}`, or another user with backend.ssh.user"
    elif tried.broken:
        hint = "backend.ssh.identity_file or IdentityFile in ~/.ssh/config has to name a private key"
    else:
        hint = f"`ssh-keygen -t ed25519`, then `ssh-copy-id {port}{shlex.quote(target)}`"
    return AuthenticationError(message, hint=hint)
