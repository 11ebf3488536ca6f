"""Everything that ships is valid, documented, and what it says it is."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path

import pytest

import llmtrain.config.cluster
import llmtrain.config.recipe
from llmtrain import resources
from llmtrain.config.job import resolve
from llmtrain.config.load import load_profile, load_recipe
from llmtrain.errors import ConfigError
from llmtrain.plan.model_size import model_size

RECIPES = [path.stem for path in resources.shipped("recipes")]
PROFILES = [path.stem for path in resources.shipped("cluster_profiles")]


def test_what_ships() -> None:
    assert {"tiny", "llama-8b", "llama-70b", "gpt-175b"} <= set(RECIPES)
    assert {"local", "a100-32x8", "h100-32x8"} <= set(PROFILES)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    assert "\n" not in recipe.description


@pytest.mark.parametrize("name", PROFILES)
def test_profile(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.description
    assert "\n" not in profile.description


LARGE = [recipe for recipe in RECIPES if recipe != "tiny"]
MADE_FOR = [*product(["tiny"], PROFILES), *product(LARGE, ["a100-32x8", "h100-32x8"])]


@pytest.mark.parametrize(("recipe", "profile"), MADE_FOR)
def test_every_recipe_resolves_on_the_profiles_it_is_made_for(recipe: str, profile: str) -> None:
    assert resolve(recipe, profile).digest


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-8b", 8.03e9), ("llama-70b", 70.55e9), ("gpt-175b", 174.6e9), ("tiny", 2.03e6)],
)
def test_published_sizes(name: str, parameters: float) -> None:
    assert model_size(resolve(name, "a100-32x8").recipe.model).parameters == pytest.approx(
        parameters, rel=0.002
    )


@pytest.mark.parametrize("name", [*RECIPES, *PROFILES])
def test_files_say_why(name: str) -> None:
    kind = "recipes" if name in RECIPES else "cluster_profiles"
    text = resources.find(kind, name).read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()) <= 130


@pytest.mark.parametrize("module", [llmtrain.config.recipe, llmtrain.config.cluster])
def test_every_field_has_a_docstring(module) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    bare = []
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        assert ast.get_docstring(cls), cls.name
        for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                bare += [] if said else [f"{cls.name}.{field.target.id}"]
    assert bare == []


def test_a_folder_of_the_same_name_is_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny.yaml").write_text("name: mine\n")
    assert load_recipe("tiny").name == "tiny"
    with pytest.raises(ConfigError):
        load_recipe("./tiny.yaml")


def test_templates_are_found_by_file_name() -> None:
    for path in resources.shipped("templates"):
        assert resources.find("templates", path.name) == path
    with pytest.raises(ConfigError):
        resources.find("templates", "nothing.j2")
