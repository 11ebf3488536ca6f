"""Files to nodes: what can be wrong before a single key is read."""

from __future__ import annotations

import os
from pathlib import Path

from llmtrain.config.reading.nodes import Scalar, Table, shown
from llmtrain.config.reading.yaml_text import MAX_BYTES, parse_document
from llmtrain.errors import ConfigError, Problem
from llmtrain.resources import Kind, missing_file

_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def read_table(kind: Kind, path: Path) -> tuple[Table | None, list[Problem]]:
    """The mapping that a YAML file holds; None with problems when there is none."""
    name = display_name(path)
    text, problem = _read_text(kind, path, name)
    if text is None:
        return None, [problem] if problem is not None else []
    node, problems = parse_document(text, name, base=os.fspath(path.resolve().parent))
    if isinstance(node, Table):
        return node, problems
    if problems:
        return None, problems
    if node is None or (isinstance(node, Scalar) and node.value is None):
        return None, [
            Problem(name, "the file is empty", "start with `name: ...`; `llmtrain recipes` lists examples")
        ]
    return None, [
        Problem(node.where, f"the file must hold a mapping of keys, not {shown(node)}", "write `key: value`")
    ]


def text_of(kind: Kind, path: Path) -> str:
    """The text of a file; raises ConfigError when it cannot be read."""
    text, problem = _read_text(kind, path, display_name(path))
    if text is None:
        raise ConfigError([problem] if problem is not None else [])
    return text


def display_name(path: Path) -> str:
    """A path as people know it: relative when it lies below the working directory."""
    try:
        return os.fspath(path.relative_to(Path.cwd())) if path.is_absolute() else os.fspath(path)
    except (ValueError, OSError):
        return os.fspath(path)


def _read_text(kind: Kind, path: Path, name: str) -> tuple[str | None, Problem | None]:
    try:
        if path.is_dir():
            return None, Problem(name, "is a folder, not a file", "name the YAML file inside it")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None, missing_file(kind, os.fspath(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return None, Problem(name, f"cannot be read: {reason.lower()}")
    return _decode(data, name)


def _decode(data: bytes, name: str) -> tuple[str | None, Problem | None]:
    if len(data) > MAX_BYTES:
        return None, Problem(name, f"is larger than {MAX_BYTES >> 20} MiB", "is this the right file?")
    if data.startswith(_UTF16):
        return None, Problem(name, "is UTF-16 text", "save it as UTF-8")
    if b"\x00" in data:
        return None, Problem(name, "is a binary file", "a YAML text is expected")
    try:
        return data.decode("utf-8-sig"), None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return None, Problem(
            f"{name}:{line}", f"byte 0x{data[error.start]:02x} is not UTF-8", "save the file as UTF-8"
        )
