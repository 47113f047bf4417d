"""Virtual environments for other projects' programs, so that their pins do not mix with ours.

`python -m tests.environments clients` creates the one of `make test-clients`, unless it is up to date.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH = ("torch", "transformers", "peft", "accelerate", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    folder: str
    requirements: Mapping[str, str]
    """A requirements file for each virtual environment, by its path in `folder`."""
    pinned: tuple[str, ...] = ()
    """Packages that pip installs as constraints.txt pins them, so that it installs no second build of torch."""
    extends_own: bool = False
    """The environment also has the packages of ours, which pip does not install again."""
    packages: str | None = None
    """A package.json, whose packages npm installs in the subfolder `node`."""


ENVIRONMENTS: Mapping[str, Environment] = {
    "clients": Environment(
        folder=".venv-clients",
        requirements={".": "tests/clients/requirements.txt", "pydantic-ai": "tests/clients/pydantic-ai.txt"},
        packages="tests/clients/package.json",
    ),
    "sentences": Environment(
        folder=".venv-sentences", requirements={".": "tests/clients/sentences.txt"}, extends_own=True
    ),
    "strangers": Environment(folder=".venv-strangers", requirements={".": "tests/strangers/requirements.txt"}),
    "harnesses": Environment(
        folder=".venv-harnesses",
        requirements={tool: f"tests/harnesses/{tool}.txt" for tool in ("lm-eval", "guidellm", "aiperf", "vllm", "trl")},
        pinned=TORCH,
    ),
    "cluster": Environment(
        folder=".venv-cluster", requirements={".": "tests/cluster/requirements.txt"}, extends_own=True
    ),
    "gguf": Environment(folder=".venv-gguf", requirements={".": "tests/conformance/gguf-requirements.txt"}),
    "deploy": Environment(
        folder=".venv-deploy",
        requirements={".": "tests/platform/deploy/requirements.txt"},
        packages="tests/platform/deploy/package.json",
    ),
}


def create(environment: Environment, root: Path = ROOT) -> None:
    """Create or update the environment. Do nothing if it was made from the same files."""
    constraints = _pins(root, environment.pinned)
    files = [*environment.requirements.values(), *([environment.packages] if environment.packages else [])]
    made_from = "\n".join([sys.version, constraints, *((root / file).read_text() for file in files)])
    folder = root / environment.folder
    ready = folder / ".made-from"
    if ready.exists() and ready.read_text() == made_from:
        return
    if environment.packages and shutil.which("npm") is None:
        sys.exit(f"npm is needed for {environment.packages}: apt-get install nodejs npm")
    folder.mkdir(exist_ok=True)
    ready.unlink(missing_ok=True)
    limits = folder / "constraints.txt"
    limits.write_text(constraints)
    for name, file in environment.requirements.items():
        # This environment's pip installs into the new one. A copy of pip in each would take seconds.
        _run(sys.executable, "-m", "venv", "--without-pip", folder / name)
        if environment.extends_own:
            (own,) = {path for path in map(Path, sys.path) if path.name == "site-packages"}
            (inner,) = (folder / name / "lib").glob("python*/site-packages")
            # The later line makes Python read the files of ours that add directories.
            (inner / "own.pth").write_text(f"import site; site.addsitedir({str(own)!r})\n")
        pip = (sys.executable, "-m", "pip", "--python", folder / name / "bin" / "python")
        _run(*pip, "install", "--quiet", "-c", limits, "-r", root / file)
    if environment.packages:
        node = folder / "node"
        node.mkdir(exist_ok=True)
        shutil.copy(root / environment.packages, node)
        _run("npm", "install", "--no-audit", "--no-fund", "--loglevel", "error", folder=node)
    ready.write_text(made_from)


def _pins(root: Path, packages: tuple[str, ...]) -> str:
    lines = (root / "constraints.txt").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("==")[0] in packages)


def _run(*command: str | Path, folder: Path | None = None) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"this command failed: {' '.join(map(str, error.cmd))}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.environments", description=__doc__)
    parser.add_argument("name", choices=ENVIRONMENTS)
    create(ENVIRONMENTS[parser.parse_args().name])


if __name__ == "__main__":
    main()
