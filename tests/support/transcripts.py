"""Transcripts of wrong command lines: `tests/cli/bad_input/*.txt`.

## name of the case edit r.yaml: layers: 4 => layers: four $ recipes check r.yaml error: r.yaml:4: ...

`edit FILE: old => new` changes the first place of `old` in RECIPE (r.yaml) or PROFILE (c.yaml); `text FILE:
...` and `hex FILE: ...` give the whole file, `large FILE: n` one of n bytes. `\\n`, `\\t`, `\\a` stand for
control characters. Files that the command names and no line gives are RECIPE and PROFILE as they are. What
follows the command is standard error to the letter; `<NAME>` stands for a list that grows with the product.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from llmtrain.cli.main import COMMANDS
from llmtrain.config.cluster import ClusterProfile, LinkConfig
from llmtrain.config.layout import Layout
from llmtrain.config.model import ModelConfig
from llmtrain.config.reading.schema import fields_of
from llmtrain.config.recipe import Recipe
from llmtrain.hardware import ACCELERATORS, LINKS
from llmtrain.resources import shipped
from tests.support.documents import PROFILE, RECIPE

WORDS: dict[str, str] = {
    "RECIPE_KEYS": ", ".join(entry.key for entry in fields_of(Recipe)),
    "MODEL_KEYS": ", ".join(entry.key for entry in fields_of(ModelConfig)),
    "CLUSTER_KEYS": ", ".join(entry.key for entry in fields_of(ClusterProfile)),
    "LINK_KEYS": ", ".join(entry.key for entry in fields_of(LinkConfig)),
    "LAYOUT_KEYS": ", ".join(entry.key for entry in fields_of(Layout)),
    "ACCELERATORS": ", ".join(ACCELERATORS),
    "INNER_LINKS": ", ".join(name for name, link in LINKS.items() if link.inside_node),
    "COMMANDS": ", ".join(COMMANDS),
    "RECIPES": ", ".join(path.stem for path in shipped("recipes")),
    "PROFILES": ", ".join(path.stem for path in shipped("cluster_profiles")),
}
"""Lists inside messages that grow with the product."""

BASES = {"r.yaml": RECIPE, "c.yaml": PROFILE}
_ESCAPES = {"n": "\n", "t": "\t", "a": "\a", "\\": "\\"}


@dataclass
class Case:
    """One wrong command line and what it says."""

    name: str
    arguments: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    says: str = ""

    def write(self, folder: Path) -> None:
        """Put the files where the command runs."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def read_cases(path: Path) -> list[Case]:
    """All cases of a file, in order."""
    blocks = path.read_text(encoding="utf-8").split("## ")[1:]
    return [_case(block) for block in blocks]


def _case(block: str) -> Case:
    name, _, body = block.partition("\n")
    head, _, tail = body.partition("$ ")
    command, _, says = tail.partition("\n")
    case = Case(name.strip(), shlex.split(command))
    case.files = {known: text.encode() for known, text in BASES.items() if known in case.arguments}
    for line in head.splitlines():
        verb, _, rest = line.partition(" ")
        file, _, value = rest.partition(": ")
        case.files[file] = _content(verb, value, case.files.get(file, b""))
    for word, text in WORDS.items():
        says = says.replace(f"<{word}>", text)
    case.says = says.strip("\n")
    return case


def _content(verb: str, value: str, before: bytes) -> bytes:
    if verb == "hex":
        return bytes.fromhex(value)
    if verb == "large":
        return b"#" * int(value)
    if verb == "text":
        return _unescaped(value).encode()
    old, arrow, new = (_unescaped(part) for part in value.partition(" => "))
    assert verb == "edit" and arrow and old.encode() in before, f"cannot edit: {value}"
    return before.replace(old.encode(), new.encode(), 1)


def _unescaped(text: str) -> str:
    pieces = iter(text)
    return "".join(_ESCAPES[next(pieces)] if piece == "\\" else piece for piece in pieces)
