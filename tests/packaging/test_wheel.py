"""The wheel, the source archive and an editable checkout: each works alone and brings its data along."""

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DATA = ("templates", "recipes", "cluster_profiles")


def data_files() -> set[str]:
    return {
        f"{folder}/{path.name}"
        for folder in DATA
        for path in (ROOT / folder).iterdir()
        if path.name != ".gitkeep"
    }


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> Path:
    """A folder with the wheel and the source archive, built from a copy of what is in the checkout."""
    pytest.importorskip("hatchling", reason="needs hatchling to build the wheel: pip install '.[test]'")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def only(folder: Path, pattern: str) -> Path:
    [found] = folder.glob(pattern)
    return found


def run_recipes(path: Path, folder: Path) -> list[str]:
    """Names that `llmtrain recipes --json` prints with the package at `path`, away from any checkout."""
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import llmtrain.cli.main as m;"
        "print(m.__file__, file=sys.stderr); sys.exit(m.run(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(path), "recipes", "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr.startswith(str(path)), f"another copy was run: {done.stderr}"
    return [entry["name"] for entry in json.loads(done.stdout)["recipes"]]


def test_wheel_holds_data_and_no_tests(archives) -> None:
    names = zipfile.ZipFile(only(archives, "*.whl")).namelist()
    shipped = {name.partition("/_data/")[2] for name in names if "/_data/" in name}
    assert shipped - {f"{folder}/.gitkeep" for folder in DATA} == data_files()
    assert not [name for name in names if name.startswith(("tests", "templates", "recipes"))]
    assert not [name for name in names if name.endswith(".pyc")]


def test_wheel_works_in_an_empty_folder(archives, tmp_path) -> None:
    place = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    wheel = only(archives, "*.whl")
    subprocess.run(
        [*command, "--target", str(place), str(wheel)], capture_output=True, timeout=300, check=True
    )
    names = run_recipes(place, tmp_path)
    assert names == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert (place / "bin" / "llmtrain").is_file(), "the command is installed"


def test_source_archive_builds_the_same_wheel(archives, tmp_path) -> None:
    with tarfile.open(only(archives, "*.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    source = only(tmp_path, "llmtrain-*")
    assert {
        f"{folder}/{path.name}" for folder in DATA for path in (source / folder).glob("*.*")
    } >= data_files()
    assert not [path for path in source.rglob("*") if path.name in ("runs", ".venv", "__pycache__")]
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=source, capture_output=True, timeout=300, check=True)
    built, original = (zipfile.ZipFile(only(folder, "*.whl")) for folder in (tmp_path, archives))
    assert sorted(built.namelist()) == sorted(original.namelist())


def test_a_checkout_finds_its_own_data(tmp_path) -> None:
    assert "tiny" in run_recipes(ROOT, tmp_path)


def test_command_line_is_an_entry_point() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("llmtrain ")
