"""Builds the container image without a container engine, by running the Dockerfile's steps in a plain Debian chroot.

The steps can read the host paths in `LORAMUX_CHROOT_BINDS`, for example the certificates of a private package index.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.platform.deploy.dockerfile import Stage, read_stages

ROOT = Path(__file__).parents[3]
CONTAINER = ROOT / "platform" / "deploy" / "container"
PATH = "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"


@dataclass
class Image:
    """The files and the configuration at the end of a stage."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    directory: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    user: str = "0:0"


class Builder:
    """Runs the steps of the Dockerfile. Each stage starts with a copy of its base's files."""

    def __init__(self, work: Path, arguments: Mapping[str, str]) -> None:
        self._work = work
        self._arguments = arguments
        self._stages = read_stages(CONTAINER / "Dockerfile")
        self._images: dict[str, Image] = {}
        self.context = work / "context"
        copy_context(self.context)

    def build(self, name: str) -> Image:
        if name not in self._images:
            self._images[name] = self._debian() if name not in self._stages else self._run_stage(self._stages[name])
        return self._images[name]

    def _debian(self) -> Image:
        """Install the contents of `debian:bookworm-slim`."""
        root = self._work / "debian"
        command = ["debootstrap", "--variant=minbase", "bookworm", str(root), "http://deb.debian.org/debian"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return Image(root)

    def _run_stage(self, stage: Stage) -> Image:
        base = self.build(stage.base)
        image = Image(self._work / stage.name, dict(base.environment), base.directory, user=base.user)
        image.entrypoint, image.command = list(base.entrypoint), list(base.command)
        subprocess.run(["cp", "-a", base.root, image.root], check=True)
        arguments: dict[str, str] = {}
        for instruction in stage.instructions:
            match instruction.name:
                case "RUN":
                    run_in(image, ["/bin/sh", "-c", instruction.value], arguments)
                case "COPY":
                    self._copy(image, instruction.words)
                case "ENV":
                    for pair in shlex.split(instruction.value):
                        name, value = pair.split("=", 1)
                        image.environment[name] = value.replace("$PATH", image.environment["PATH"])
                case "ARG":
                    name, value = instruction.value.split("=", 1)
                    arguments[name] = self._arguments.get(name, value)
                case "WORKDIR":
                    image.directory = instruction.value
                    (image.root / image.directory.lstrip("/")).mkdir(parents=True, exist_ok=True)
                case "ENTRYPOINT":
                    image.entrypoint = instruction.words
                case "CMD":
                    image.command = instruction.words
                case "USER":
                    image.user = instruction.value
                case "VOLUME" | "EXPOSE" | "STOPSIGNAL" | "HEALTHCHECK":
                    pass
                case other:
                    raise AssertionError(f"the test does not know the instruction {other}")
        return image

    def _copy(self, image: Image, words: list[str]) -> None:
        source = self.context
        if words[0].startswith("--from="):
            source = self.build(words[0].removeprefix("--from=")).root
            words = words[1:]
        *names, target = words
        place = image.root / os.path.join(image.directory, target).lstrip("/")
        for name in names:
            found = source / name.lstrip("/")
            if found.is_dir():
                subprocess.run(["cp", "-a", f"{found}/.", place], check=True)
            else:
                shutil.copy2(found, place)


def copy_context(place: Path) -> None:
    """Copy the tracked files that Dockerfile.dockerignore does not exclude."""
    ignored = (CONTAINER / "Dockerfile.dockerignore").read_text().splitlines()
    shown = [line[1:] for line in ignored if line.startswith("!")]
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        if any(Path(Path(name).parts[0]).match(pattern) for pattern in shown):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name, follow_symlinks=False)


def run_in(image: Image, command: list[str], arguments: Mapping[str, str]) -> None:
    """Run a step as root, with the network of this machine."""
    network = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_PROXY")}
    variables = {**network, **image.environment, **arguments}
    with mounted(image.root, bound_paths()):
        inside = ["chroot", str(image.root), "/usr/bin/env", "-C", image.directory, *command]
        subprocess.run(inside, env=variables, check=True)


def bound_paths() -> list[Path]:
    return [Path("/etc/resolv.conf"), *map(Path, os.environ.get("LORAMUX_CHROOT_BINDS", "").split())]


@contextmanager
def mounted(root: Path, paths: list[Path]) -> Iterator[None]:
    """Show `/proc`, `/dev` and `paths` of this machine inside `root`, read-only, so that no step can change them."""
    with ExitStack() as stack:

        def mount(place: Path, *options: str | Path) -> None:
            subprocess.run(["mount", *options, place], check=True)
            stack.callback(subprocess.run, ["umount", place], check=True)

        for path in [Path("/proc"), Path("/dev"), *paths]:
            place = root / path.relative_to("/")
            if path.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
            mount(place, "--bind", path)
            subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        mount(root / "dev" / "shm", "-t", "tmpfs", "tmpfs")
        yield
