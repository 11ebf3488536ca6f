"""What `llmtrain recipes` and `llmtrain profiles` share: list, show and check files of one kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmtrain.cli import console

if TYPE_CHECKING:
    from llmtrain.config.cluster import ClusterProfile
    from llmtrain.config.load import Loaded
    from llmtrain.config.recipe import Recipe
    from llmtrain.errors import Problem
    from llmtrain.resources import Kind


def entries(kind: Kind) -> list[dict[str, str]]:
    """Name, description and path of every shipped file; raises ConfigError when one is broken."""
    from llmtrain.resources import shipped

    found = []
    for path in shipped(kind):
        value = load(kind, path.stem)
        found.append({"name": value.name, "description": value.description, "path": str(path)})
    return found


def print_list(kind: Kind, *, as_json: bool) -> None:
    """All shipped files of a kind."""
    found = entries(kind)
    if as_json:
        console.emit_json({"recipes" if kind == "recipes" else "profiles": found})
        return
    console.emit(console.columns(("NAME", "DESCRIPTION"), [(e["name"], e["description"]) for e in found]))


def print_one(kind: Kind, reference: str, *, as_json: bool) -> None:
    """A file as it stands, or as the values it holds; raises ConfigError."""
    from llmtrain.config.codec import to_json
    from llmtrain.config.reading.document import text_of
    from llmtrain.resources import find

    path = find(kind, reference)
    if as_json:
        console.emit_json({"path": str(path), noun(kind): to_json(load(kind, reference))})
    else:
        console.emit(text_of(kind, path).rstrip("\n"))


def print_check(kind: Kind, reference: str, problems: list[Problem], *, as_json: bool) -> None:
    """The outcome of a check; raises ConfigError when there are problems, so that the exit code is 2."""
    from llmtrain.errors import ConfigError

    if problems:
        raise ConfigError(problems)
    if as_json:
        console.emit_json({noun(kind): reference, "problems": []})
    else:
        console.emit(f"{reference}: no problems")


def load(kind: Kind, reference: str) -> Recipe | ClusterProfile:
    """A recipe or a profile; raises ConfigError with all its problems."""
    from llmtrain.config.load import load_profile, load_recipe

    return (load_recipe if kind == "recipes" else load_profile)(reference)


def read(kind: Kind, reference: str, overrides: list[Any] | None = None) -> Loaded[Any]:
    """A recipe or a profile with its problems."""
    from llmtrain.config.load import read_profile, read_recipe

    return (read_recipe if kind == "recipes" else read_profile)(reference, overrides or [])


def noun(kind: Kind) -> str:
    """JSON key of one file of a kind."""
    return "recipe" if kind == "recipes" else "profile"
