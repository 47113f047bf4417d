from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ports import free_port

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "migrations", "adapter_store", "engine", "platform", "admin")
PYTHONS = os.environ.get("LORAMUX_PYTHONS", sys.executable).split()
BUILD = "import hatchling.build as build, sys; print(build.build_{kind}(sys.argv[1]))"


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel: Path
    wheel_of_sdist: Path
    tracked: tuple[str, ...]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LORAMUX_", "PYTHON"))}
    done = subprocess.run(
        command, cwd=cwd, env={**inherited, **variables}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    directory = tmp_path_factory.mktemp("package")
    backend, out, unpacked = (directory / name for name in ("backend", "out", "unpacked"))
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", backend, "hatchling>=1.27,<2", cwd=ROOT)
    tracked = tuple(run("git", "ls-files", cwd=ROOT).splitlines())
    checkout = directory / "checkout"
    for name in tracked:
        copy = checkout / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            copy.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).exists():
            copy.write_bytes((ROOT / name).read_bytes())

    def build(kind: str, place: Path, target: Path) -> Path:
        name = run(sys.executable, "-c", BUILD.format(kind=kind), target, cwd=place, PYTHONPATH=str(backend))
        return target / name.strip()

    sdist, wheel = build("sdist", checkout, out), build("wheel", checkout, out)
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return Built(sdist, wheel, build("wheel", source, directory / "again"), tracked)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


def test_wheel_contains_exactly_the_six_folders(built: Built) -> None:
    held = {name.removeprefix("loramux/") for name in contents(built.wheel) if name.startswith("loramux/")}
    assert held == {name for name in built.tracked if name.partition("/")[0] in FOLDERS}
    assert {name.partition("/")[0] for name in contents(built.wheel)} == {"loramux", "loramux-0.1.0.dist-info"}


def test_sdist_builds_the_same_wheel(built: Built) -> None:
    assert contents(built.wheel_of_sdist) == contents(built.wheel)


def test_sdist_contains_documentation_but_no_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "docs/quick-start.md"} <= names
    assert not any(name.startswith(("tests", "benchmarks", ".ci", ".devcontainer")) for name in names)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: Path(python).name)
def test_an_installed_wheel_runs_the_demo_and_an_llm(built: Built, python: str, tmp_path: Path) -> None:
    run(python, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    programs = tmp_path / "venv" / "bin"
    requirement = f"loramux[demo] @ file://{built.wheel}"
    run(programs / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", requirement, cwd=tmp_path)
    ports = ("--port", str(free_port()), "--admin-port", str(free_port()))
    shown = run(programs / "loramux", "demo", "--exit", *ports, cwd=tmp_path)
    assert "It adds up" in shown
    example = (ROOT / "docs" / "examples" / "mixed_adapters.py").read_text()
    (tmp_path / "example.py").write_text(example)
    demo = ROOT / "admin" / "demo"
    adapter = demo / "adapters" / "pirate"
    answers = run(programs / "python", "example.py", demo / "base", adapter, cwd=tmp_path)
    assert answers.startswith("base: The capital of France is Paris.\n")
    assert f"\n{adapter}: Arr, matey!" in answers
