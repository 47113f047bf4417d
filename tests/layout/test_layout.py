"""The namespace package can be imported from anywhere, and every package is documented."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "migrations", "adapter_store", "engine", "platform", "admin")


def python_files(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]


def packages(folder: str) -> list[Path]:
    """Directories under a folder that contain importable modules, which excludes numbered migrations."""
    modules = [path for path in python_files(folder) if path.stem.isidentifier()]
    return sorted({path.parent.relative_to(ROOT) for path in modules} - {Path(folder)})


PACKAGES = [package for folder in FOLDERS for package in packages(folder)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_is_linked_into_the_namespace(folder: str) -> None:
    link = ROOT / ".src" / "loramux" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / folder
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", FOLDERS)
def test_top_level_folder_is_not_a_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), "it would shadow a Python or third-party module"


def test_namespace_contains_exactly_the_six_folders() -> None:
    assert sorted(path.name for path in (ROOT / ".src" / "loramux").iterdir() if path.name != "__pycache__") == sorted(
        FOLDERS
    )


def test_tests_are_not_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("folder", [*FOLDERS, "tests", "benchmarks"])
def test_no_file_shadows_a_standard_module(folder: str) -> None:
    named = {path.stem for path in python_files(folder)} & set(sys.stdlib_module_names)
    assert named <= {"__init__", "__main__"}


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_no_package_shadows_a_standard_module(package: Path) -> None:
    assert package.name not in sys.stdlib_module_names


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_package_init_contains_only_a_docstring(package: Path) -> None:
    module = ast.parse((ROOT / package / "__init__.py").read_text())
    assert ast.get_docstring(module)
    assert len(module.body) == 1


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_each_package_has_a_line_in_the_nearest_readme(package: Path) -> None:
    readme = next(folder / "README.md" for folder in package.parents if (ROOT / folder / "README.md").exists())
    is_mentioned = f"`{package.name}/`" in (ROOT / readme).read_text()
    assert is_mentioned, f"{readme} does not mention {package.name}/"


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_nothing_imports_from_a_conftest(folder: str) -> None:
    """A conftest contains only fixtures. Shared test code is in modules named after their contents."""
    importing = []
    for path in python_files(folder):
        source = path.read_text()
        # Parsing every file would take seconds.
        if "conftest" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if any(name.rpartition(".")[2] == "conftest" for name in names):
                importing.append(f"{path.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
    assert importing == []


@pytest.mark.parametrize("folder", [*FOLDERS, "benchmarks"])
def test_test_folders_mirror_product_folders(folder: str) -> None:
    """Test folders mirror the product's folders, except folders that contain only support code."""
    rooms = {path.parent.relative_to(ROOT / "tests") for path in python_files(f"tests/{folder}") if is_test(path)}
    assert [str(room) for room in sorted(rooms) if not (ROOT / room).is_dir()] == []


def is_test(path: Path) -> bool:
    return path.name.startswith("test_")


@pytest.mark.parametrize("folder", [*FOLDERS, "tests", "benchmarks"])
def test_each_folder_has_a_readme(folder: str) -> None:
    assert (ROOT / folder / "README.md").read_text().strip()


def test_python_keeps_its_own_platform_module() -> None:
    import platform

    assert platform.python_version().startswith("3.")
    assert "loramux" not in (platform.__file__ or "")
