"""Host keys that known_hosts files vouch for: names, wildcards, hashed names, ports, @revoked.

The format is that of sshd(8), section SSH_KNOWN_HOSTS FILE FORMAT.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

DEFAULT_PORT = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """One line that vouches for a host's key."""

    type: str
    """E.g. `ssh-ed25519`."""
    key: bytes
    """The key as it goes over the wire."""
    file: Path
    line: int


@dataclass(slots=True)
class KnownKeys:
    """What the files say about one host."""

    accepted: list[KnownKey] = field(default_factory=list)
    revoked: list[KnownKey] = field(default_factory=list)
    authority: KnownKey | None = None
    """A certificate authority for this host, which paramiko cannot use."""

    @property
    def types(self) -> tuple[str, ...]:
        """Key types that could be accepted, in the order of the files."""
        return tuple(dict.fromkeys(each.type for each in self.accepted))


def name_in_file(name: str, port: int) -> str:
    """How known_hosts files call a host: its name, with the port where it is not 22."""
    return name.lower() if port == DEFAULT_PORT else f"[{name.lower()}]:{port}"


def known_keys(files: Iterable[Path], name: str, port: int) -> KnownKeys:
    """What known_hosts files, those that exist, say about a host."""
    wanted, found = name_in_file(name, port), KnownKeys()
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            _read_line(line.split(), wanted, file, number, found)
    return found


def fingerprint(key: bytes) -> str:
    """A key's fingerprint as ssh-keygen prints it."""
    digest = base64.b64encode(hashlib.sha256(key).digest()).decode("ascii").rstrip("=")
    return f"SHA256:{digest}"


def _read_line(words: list[str], wanted: str, file: Path, number: int, found: KnownKeys) -> None:
    marker = words.pop(0) if words and words[0].startswith("@") else ""
    if len(words) < 3 or words[0].startswith("#") or not _matches(words[0].split(","), wanted):
        return
    try:
        key = base64.b64decode(words[2], validate=True)
    except (binascii.Error, ValueError):
        return
    entry = KnownKey(type=words[1], key=key, file=file, line=number)
    if marker == "@revoked":
        found.revoked.append(entry)
    elif marker == "@cert-authority":
        found.authority = found.authority or entry
    elif not marker:
        found.accepted.append(entry)


def _matches(patterns: Sequence[str], wanted: str) -> bool:
    """Whether a line is about a host: some pattern matches and no `!pattern` does."""
    if len(patterns) == 1 and patterns[0].startswith("|1|"):
        return _matches_hash(patterns[0], wanted)
    hit = False
    for pattern in patterns:
        # fnmatch would read `[` as a set of characters; here it only ever stands before a port.
        plain = pattern.lstrip("!").lower().replace("[", "\0").replace("\0", "[[]")
        if fnmatchcase(wanted, plain):
            if pattern.startswith("!"):
                return False
            hit = True
    return hit


def _matches_hash(pattern: str, wanted: str) -> bool:
    try:
        _, _, salt, digest = pattern.split("|")
        made = hmac.new(base64.b64decode(salt), wanted.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(made, base64.b64decode(digest))
    except (ValueError, binascii.Error):
        return False
