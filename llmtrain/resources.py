"""Files that ship with llmtrain: recipes, cluster profiles, templates; and how a reference becomes a file.

A reference with a path separator or a `.yaml` suffix is a path. Anything else is the name of a shipped file,
so that a folder of the same name in the working directory never gets in the way.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from llmtrain.errors import ConfigError, Problem

Kind = Literal["recipes", "cluster_profiles", "templates"]

_PACKAGE = Path(__file__).resolve().parent
_NOUN: dict[str, str] = {"recipes": "recipe", "cluster_profiles": "cluster profile", "templates": "template"}
_SUFFIXES = (".yaml", ".yml")


def shipped_folder(kind: Kind) -> Path:
    """Folder of shipped files.

    Inside the wheel `llmtrain/_data/<kind>`, in a checkout `<kind>` beside the package.
    """
    inside = _PACKAGE / "_data" / kind
    return inside if inside.is_dir() else _PACKAGE.parent / kind


def shipped(kind: Kind) -> list[Path]:
    """All shipped files of a kind, by name."""
    pattern = "*.j2" if kind == "templates" else "*.yaml"
    return sorted(shipped_folder(kind).glob(pattern))


def find(kind: Kind, reference: str) -> Path:
    """File that a reference means; raises ConfigError when a name is not shipped.

    A path is returned unchecked.
    """
    if kind == "templates":
        return _find_template(reference)
    if "/" in reference or reference.endswith(_SUFFIXES):
        return user_path(reference)
    for path in shipped(kind):
        if path.stem == reference:
            return path
    raise ConfigError([_unknown_name(kind, reference)])


def missing_file(kind: Kind, reference: str) -> Problem:
    """What to say about a path that does not exist."""
    noun = _NOUN[kind]
    stem = Path(reference).stem
    names = [path.stem for path in shipped(kind)]
    close = get_close_matches(stem, names, n=1)
    if stem in names:
        hint = f"{noun} `{stem}` ships with llmtrain; write `{stem}`, without folder and suffix"
    else:
        hint = f"did you mean the shipped {noun} `{close[0]}`?" if close else f"shipped: {', '.join(names)}"
    return Problem(where=reference, message=f"no such {noun} file", hint=hint)


def _unknown_name(kind: Kind, reference: str) -> Problem:
    names = [path.stem for path in shipped(kind)]
    noun = _NOUN[kind]
    close = get_close_matches(reference, names, n=1)
    here = Path(reference)
    if here.is_file():
        hint = f"to use the file of that name in this folder, write `./{reference}`"
    elif here.with_name(f"{here.name}.yaml").is_file() if here.name else False:
        hint = f"to use the file in this folder, write `{reference}.yaml`"
    elif close:
        hint = f"did you mean `{close[0]}`? shipped: {', '.join(names)}"
    else:
        hint = f"shipped: {', '.join(names)}; a file is given by its path, e.g. `./{reference or 'my'}.yaml`"
    return Problem(where="", message=f"no {noun} is called `{reference}`", hint=hint)


def _find_template(name: str) -> Path:
    path = shipped_folder("templates") / name
    if path.is_file():
        return path
    known = ", ".join(found.name for found in shipped("templates"))
    raise ConfigError(
        [Problem(where="", message=f"no template is called `{name}`", hint=f"shipped: {known}")]
    )


def user_path(text: str | Path) -> Path:
    """A path as a person types it. `~nobody/x` stays as it is, to be told as missing: `Path.expanduser` would
    raise RuntimeError."""
    return Path(os.path.expanduser(text))  # noqa: PTH111
