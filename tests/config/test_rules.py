"""Every rule is broken by a transcript; no rule is asked about values that are wrong themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.config.load import Loaded, read_profile, read_recipe
from llmtrain.config.reading.override import parse_overrides, split_overrides, without_prefix
from llmtrain.config.rules.cluster import CLUSTER_RULES
from llmtrain.config.rules.job import JOB_RULES, Pair
from llmtrain.config.rules.recipe import RECIPE_RULES
from llmtrain.config.rules.rule import Rule, broken, rule
from tests.support.transcripts import Case, read_cases

FOLDER = Path(__file__).parent.parent / "cli" / "bad_input"
CASES = [case for path in sorted(FOLDER.glob("*_rules.txt")) for case in read_cases(path)]


def read(case: Case) -> tuple[Loaded, Loaded]:
    texts = [text for flag, text in zip(case.arguments, case.arguments[1:], strict=False) if flag == "--set"]
    parsed, _ = parse_overrides(texts)
    for_recipe, for_cluster = split_overrides(parsed)
    if case.arguments[0] == "profiles":
        for_recipe, for_cluster = [], without_prefix(parsed)
    return read_recipe("r.yaml", for_recipe), read_profile("c.yaml", for_cluster)


def test_every_rule_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    silent: dict[str, Rule] = {
        entry.check.__name__: entry
        for entry in (*RECIPE_RULES, *CLUSTER_RULES, *JOB_RULES)
        if entry.check.__module__.endswith(
            (".recipe_rules", ".numerics_rules", ".cluster_rules", ".job_rules")
        )
    }
    for case in CASES:
        case.write(tmp_path)
        recipe, cluster = read(case)
        for name, entry in list(silent.items()):
            value = recipe.value if entry in RECIPE_RULES else cluster.value
            bad = recipe.bad if entry in RECIPE_RULES else cluster.bad
            if entry in JOB_RULES and recipe.value is not None and cluster.value is not None:
                value, bad = Pair(recipe.value, cluster.value), recipe.bad | cluster.bad
            if value is not None and broken([entry], value, bad):
                del silent[name]
    assert list(silent) == []


@rule("a.b", "c")
def _never(value: object):
    raise AssertionError("asked about an unusable value")
    yield


@pytest.mark.parametrize("bad", [("a",), ("a", "b"), ("a", "b", "x"), ("c",)])
def test_rules_on_unusable_values_are_not_asked(bad: tuple[str, ...]) -> None:
    assert broken([_never], object(), [bad]) == []


@pytest.mark.parametrize("bad", [("a", "c"), ("ab",), ("d",)])
def test_rules_on_usable_values_are(bad: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError):
        broken([_never], object(), [bad])
