"""Lists of nodes as people write them: names, ranges `node[01-32]`, `user@name:port`, hostfiles. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from llmtrain.errors import Problem

LIMIT = 10_000
"""Most nodes that one entry may stand for: more is a slip of the keyboard."""

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,31}")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_SLOTS = re.compile(r"slots\s*=\s*(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One node of a list."""

    name: str
    """Name or address as it was written; what SSH looks up in its own configuration."""
    user: str = ""
    """Empty: as SSH's configuration says."""
    port: int | None = None
    """None: as SSH's configuration says."""
    slots: int | None = None
    """Ranks that a hostfile gives the node."""
    where: str = ""
    """The place that names it."""


def expand_hosts(entries: Sequence[str], where: str) -> tuple[list[Host], list[Problem]]:
    """Hosts of a list of entries, and everything that is wrong with them; `where` is the list's field."""
    hosts: list[Host] = []
    problems: list[Problem] = []
    for index, entry in enumerate(entries):
        found, wrong = expand_entry(entry, f"{where}[{index}]")
        hosts += found
        problems += wrong
    return hosts, problems + duplicates(hosts)


def read_hostfile(text: str, where: str) -> tuple[list[Host], list[Problem]]:
    """Hosts of a hostfile: an entry a line, `#` starts a comment, `slots=N` may follow a name."""
    hosts: list[Host] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split(None, 1)
        if not words:
            continue
        place = f"{where}:{number}"
        slots = _SLOTS.fullmatch(words[1].strip()) if len(words) > 1 else None
        if len(words) > 1 and slots is None:
            hint = "a line is a name or range, then `slots=N` if you like"
            problems.append(
                Problem(place, f"`{words[1].strip()}` behind `{words[0]}` is not understood", hint)
            )
            continue
        found, wrong = expand_entry(words[0], place)
        hosts += [replace(host, slots=int(slots[1]) if slots else None) for host in found]
        problems += wrong
    if not hosts and not problems:
        problems.append(Problem(where, "the hostfile names no node", "one name a line, e.g. `node[01-04]`"))
    return hosts, problems + duplicates(hosts)


def expand_entry(entry: str, where: str) -> tuple[list[Host], list[Problem]]:
    """Hosts of one entry; commas outside brackets separate entries inside it."""
    hosts: list[Host] = []
    try:
        for part in _split(entry):
            hosts += _expand_part(part, where)
    except ValueError as error:
        return [], [Problem(where, str(error), "e.g. `node07`, `node[01-32]`, `rack[1-2]n[1-16,20]`")]
    return hosts, []


def duplicates(hosts: Iterable[Host]) -> list[Problem]:
    """A problem for every host that is named again."""
    first: dict[str, Host] = {}
    problems = []
    for host in hosts:
        known = first.setdefault(host.name.lower(), host)
        if known is not host:
            first_place = "" if known.where == host.where else f", first at {known.where}"
            message = f"`{host.name}` is named twice{first_place}"
            problems.append(Problem(host.where, message, "name every node once"))
    return problems


def _split(entry: str) -> Iterator[str]:
    """Parts between commas that stand outside brackets; raises ValueError for brackets that do not match."""
    depth, part = 0, ""
    for character in entry.strip():
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError(f"`{entry}`: brackets do not match")
        if character == "," and not depth:
            yield part.strip()
            part = ""
        else:
            part += character
    if depth:
        raise ValueError(f"`{entry}`: `[` is not closed")
    yield part.strip()


def _expand_part(part: str, where: str) -> Iterator[Host]:
    user, at, rest = part.rpartition("@")
    if at and not USER.fullmatch(user):
        raise ValueError(f"`{part}`: `{user}` is not a user name")
    # Two colons outside brackets are an IPv6 address, which cannot carry a port here.
    name, port = rest, None
    if rest.count(":") == 1:
        name, _, digits = rest.partition(":")
        if not digits.isascii() or not digits.isdigit() or not 1 <= int(digits) <= 65535:
            raise ValueError(f"`{part}`: `{digits}` is not a port (1 to 65535)")
        port = int(digits)
    pieces = re.split(r"\[(.*?)\]", name)
    choices = [[piece] if index % 2 == 0 else _numbers(piece, part) for index, piece in enumerate(pieces)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > LIMIT:
        raise ValueError(f"`{part}` stands for {count:,} nodes; at most {LIMIT:,} are meant")
    for combination in itertools.product(*choices):
        full = "".join(combination)
        if not full:
            raise ValueError("a node name is empty")
        if not _NAME.fullmatch(full) and not _is_ipv6(full):
            raise ValueError(f"`{full}` is not a host name or address")
        yield Host(name=full, user=user, port=port, where=where)


def _numbers(body: str, part: str) -> list[str]:
    """Numbers of one pair of brackets, with the leading zeros of the first number kept."""
    found: list[str] = []
    for piece in body.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise ValueError(f"`{part}`: `[{body}]` is not a list of numbers and ranges")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise ValueError(f"`{part}`: the range {low}-{high} runs backwards")
        if len(low) != len(high) and low.startswith("0"):
            raise ValueError(f"`{part}`: {low} and {high} differ in width")
        if int(high) - int(low) >= LIMIT:
            raise ValueError(f"`{part}`: the range {low}-{high} holds more than {LIMIT:,} nodes")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found


def _is_ipv6(text: str) -> bool:
    import ipaddress

    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
