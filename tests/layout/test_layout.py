"""The house rules that keep the namespace package importable from a checkout, an editable install and a wheel."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "migrations", "adapter_store", "engine", "platform", "admin")


def python_files(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_is_linked_into_the_namespace(folder: str) -> None:
    link = ROOT / ".src" / "loramux" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / folder
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", FOLDERS)
def test_top_level_folder_is_no_package_of_its_own(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), "it would shadow a module of Python or of a dependency"


def test_namespace_holds_the_six_folders_and_nothing_else() -> None:
    assert sorted(path.name for path in (ROOT / ".src" / "loramux").iterdir() if path.name != "__pycache__") == sorted(
        FOLDERS
    )


def test_tests_are_no_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("folder", [*FOLDERS, "tests", "benchmarks"])
def test_no_file_is_named_like_a_standard_module(folder: str) -> None:
    named = {path.stem for path in python_files(folder)} & set(sys.stdlib_module_names)
    assert named <= {"__init__", "__main__"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_are_absolute(folder: str) -> None:
    for path in python_files(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}:{node.lineno}"


@pytest.mark.parametrize("folder", [*FOLDERS, "tests", "benchmarks"])
def test_each_folder_says_what_lives_there(folder: str) -> None:
    assert (ROOT / folder / "README.md").read_text().strip()


def test_python_keeps_its_own_platform_module() -> None:
    import platform

    assert platform.python_version().startswith("3.")
    assert "loramux" not in (platform.__file__ or "")
