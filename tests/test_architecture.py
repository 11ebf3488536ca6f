"""What keeps the house in order: floors, sizes, and what the README claims."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.cli import main
from llmtrain.cli.main import COMMANDS
from llmtrain.config.job import resolve
from llmtrain.errors import ConfigError, ExitStatus, InfeasibleError
from llmtrain.plan.make import make_plan
from llmtrain.resources import shipped
from tests.support.run_folder import abandon, make_run, write_attempt
from tests.support.sample_events import attempt_files

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "llmtrain"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = MODULES + sorted((ROOT / "tests").rglob("*.py"))
FILE_LINES, FUNCTION_LINES = 400, 60
HOMES = {
    "torch": ("engine/",),
    "paramiko": ("transport/",),
    "jinja2": ("render/",),
    "pynvml": ("probe/",),
    "psutil": ("probe/", "agent/", "backends/", "supervise/"),
    "rich": ("observe/", "cli/console.py"),
    "prometheus_client": ("observe/",),
    "pickle": (),
    "marshal": (),
    "shelve": (),
}
"""Packages and where, below llmtrain/, they may be imported."""


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(module: ast.Module) -> set[str]:
    """Top-level packages that a module imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


# ---- the shape of the code
def test_floors_hold() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_file_and_no_function_is_too_long() -> None:
    long: list[str] = []
    for path in SOURCES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > FILE_LINES:
            long.append(f"{relative(path)}: {lines} lines")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > FUNCTION_LINES:
                    long.append(f"{relative(path)}:{node.lineno}: {node.name} has {size} lines")
    assert not long, "\n".join(long)


def test_heavy_packages_are_imported_where_they_live_only() -> None:
    strays = []
    for path in MODULES:
        place = str(path.relative_to(PACKAGE))
        for name in imports(tree(path)) & set(HOMES):
            if not place.startswith(HOMES[name]):
                strays.append(f"llmtrain/{place} imports {name}")
    assert not strays, "\n".join(strays)


def test_no_drawer_for_everything() -> None:
    names = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
    assert not [relative(path) for path in SOURCES if path.stem in names or path.parent.name in names]


def test_no_shell_no_exit_no_code_from_text() -> None:
    found: list[str] = []
    for path in MODULES:
        place = str(path.relative_to(PACKAGE))
        module = tree(path)
        started = {node for guard in module.body if _is_main_guard(guard) for node in ast.walk(guard)}
        for node in ast.walk(module):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            bad = called in ("os.system", "os.popen", "eval", "exec") or keywords.get("shell") == "True"
            leaves = called in ("sys.exit", "exit", "quit") and place != "cli/main.py" and node not in started
            if bad or leaves:
                found.append(f"llmtrain/{place}:{node.lineno}: {called}")
    assert not found, "\n".join(found)


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def test_sources_are_ascii() -> None:
    assert not [relative(path) for path in SOURCES if not path.read_bytes().isascii()]


def test_everything_public_says_what_it_is() -> None:
    silent: list[str] = []
    for path in MODULES:
        module = tree(path)
        if path.stat().st_size and ast.get_docstring(module) is None:
            silent.append(f"{relative(path)}: module")
        for node in ast.walk(module):
            named = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
            if named and ast.get_docstring(node) is None and not _is_inner(module, node):
                silent.append(f"{relative(path)}:{node.lineno}: {node.name}")
    assert not silent, "\n".join(silent)


def _is_inner(module: ast.Module, node: ast.AST) -> bool:
    """Whether a definition stands inside a function or a private class."""
    return any(
        node is not outer and node in ast.walk(outer)
        for outer in ast.walk(module)
        if isinstance(outer, ast.FunctionDef)
        or (isinstance(outer, ast.ClassDef) and outer.name.startswith("_"))
    )


# ---- everything that is shipped works
@pytest.fixture(scope="module")
def fits() -> set[tuple[str, str]]:
    """Pairs of a shipped recipe and a shipped profile that plan together."""
    found = set()
    for recipe in shipped("recipes"):
        for profile in shipped("cluster_profiles"):
            try:
                plan = make_plan(resolve(recipe.stem, profile.stem), top=1)
            except (ConfigError, InfeasibleError) as error:
                assert error.text()
                continue
            assert plan.plans and plan.ladder
            found.add((recipe.stem, profile.stem))
    return found


@pytest.mark.parametrize("recipe", [path.stem for path in shipped("recipes")])
def test_every_recipe_fits_a_profile(recipe, fits) -> None:
    assert any(fitting == recipe for fitting, _ in fits)


@pytest.mark.parametrize("profile", [path.stem for path in shipped("cluster_profiles")])
def test_every_profile_fits_a_recipe(profile, fits) -> None:
    assert any(fitting == profile for _, fitting in fits)


def test_the_main_job_and_the_reference_fit_where_they_are_meant_to(fits) -> None:
    assert {("tiny", "local"), ("gpt-175b", "a100-32x8"), ("llama-70b", "h100-32x8")} <= fits


# ---- what is written down is true
def test_changelog_has_an_unreleased_section_with_entries() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = text.partition("## [Unreleased]")[2].partition("\n## ")[0]
    assert "### Added" in section and section.count("\n- ") >= 10


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def readme_commands() -> list[list[str]]:
    """Every `llmtrain ...` in the README, in code blocks and in backticks."""
    blocks = "\n".join(re.findall(r"```\w*\n(.*?)```", readme(), re.DOTALL))
    lines = re.split(r"\n|&&", blocks) + re.findall(r"(?<!`)`(llmtrain [^`]+)`", readme())
    words = (line.partition("#")[0].split() for line in lines)
    return [found[1:] for found in words if found[:1] == ["llmtrain"]]


def test_readme_names_only_commands_and_options_that_exist(capsys) -> None:
    named = readme_commands()
    assert {words[0] for words in named} >= set(COMMANDS), "every command is in the README"
    for words in named:
        if words[0].startswith("-"):
            continue
        group = [word for word in words[1:2] if words[0] in ("data", "checkpoint", "recipes", "profiles")]
        status = main.run([words[0], *group, "--help"])
        shown = capsys.readouterr()
        assert status == 0, f"{words}: {shown.err}"
        for option in (word for word in words if re.fullmatch(r"-{1,2}[a-z-]+", word)):
            assert re.search(rf"(^|[\s,]){option}\b", shown.out), f"{words}: no {option}"


def test_files_that_docstrings_and_comments_name_exist() -> None:
    known = {"/".join(path.parts[start:]) for path in SOURCES for start in range(len(path.parts))}
    stale = [
        f"{relative(path)}: {name}"
        for path in SOURCES
        for name in re.findall(r"`([\w./-]+\.py)`", path.read_text(encoding="utf-8"))
        if name not in known
    ]
    assert not stale, "\n".join(stale)


def test_readme_lists_every_exit_code() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.+?) \|", readme(), re.MULTILINE))
    assert {int(code) for code in rows} == {int(status) for status in ExitStatus}


def test_readme_reading_order_names_files_that_exist() -> None:
    order = readme().partition("## Reading order")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/.-]+\.(?:py|yaml|j2|md))`", order)
    assert len(named) >= 10
    assert not [name for name in named if not (ROOT / name).is_file() and not (PACKAGE / name).is_file()]


def test_status_document_of_the_readme_is_what_status_prints(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "tiny-0001", steps=60)
    write_attempt(run, 1, attempt_files(1, restored=0, steps=28, world_size=8, outcome="failed"))
    abandon(run)
    assert main.run(["status", str(run.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    section = readme().partition("### `status --json`")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert len(named) >= 10 and set(named) <= set(document)
