"""Lists the calls that bring vLLM's parts to a card's machine, and rehearses them in a folder.

    python -m benchmarks.gpu.vllm_calls list build/vllm
    python -m benchmarks.gpu.vllm_calls rehearse build/vllm build/machine

A card's machine may accept only CALL_BYTES per call, and no downloads. Each call brings this checkout, without the
files that git ignores, and some named files, and then runs a command in the checkout. The next call replaces the
checkout, but what a command writes elsewhere stays until the machine is given back. So each call moves one part to
STAGE, and the last call joins them. `vllm_parts.py` makes the parts.

The rehearsal does the same in a folder on this machine and refuses what a card's machine would refuse.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALL_BYTES = 64 << 20
"""Largest call, in bytes: the checkout and the named files."""

STAGE = "/tmp/vllm"
"""The folder on the card's machine that keeps the parts between calls."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the paths that it brings in addition to the checkout, and its command."""

    brings: tuple[str, ...]
    command: str


def calls_of(parts: Sequence[str], run: str, stage: str = STAGE) -> list[Call]:
    """The calls that bring these parts, and the last call, which joins them and then runs `run`."""
    python = f"{shlex.quote(sys.executable)} -m" if stage != STAGE else "python -m"
    moves = [Call((part,), f"mkdir -p {stage}/parts && mv {shlex.quote(part)} {stage}/parts/") for part in parts]
    # The call can be repeated, because a folder with this name is complete.
    join = f"{python} benchmarks.gpu.vllm_parts join {stage}/parts {stage}/new && mv {stage}/new {stage}/peer"
    return [*moves, Call((), f"{{ [ -d {stage}/peer ] || {{ {join}; }}; }} && {run}")]


class FolderMachine:
    """A folder that stands in for a card's machine. `root` is the checkout that each call brings."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        self.stage = str(folder / "stage")

    def run(self, call: Call) -> str:
        """Make one call, and return what its command printed. Raises ValueError if it brings too much or fails."""
        listed = ["git", "-C", str(self._root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
        paths = [name for name in (*names, *call.brings) if name and (self._root / name).is_file()]
        num_bytes = sum((self._root / name).lstat().st_size for name in paths)
        if num_bytes > CALL_BYTES:
            raise ValueError(
                f"a call of {num_bytes / 2**20:.1f} MiB is larger than {CALL_BYTES / 2**20:g} MiB: cut smaller parts"
            )
        checkout = self._folder / "checkout"
        shutil.rmtree(checkout, ignore_errors=True)
        for name in paths:
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self._root / name, checkout / name, follow_symlinks=False)
        variables = os.environ | {"PYTHONPATH": str(checkout)}
        done = subprocess.run(
            ["bash", "-c", call.command], cwd=checkout, env=variables, capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"a call ended with {done.returncode}: {last}")
        return f"{num_bytes / 2**20:.1f} MiB, {done.stdout.strip()}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.vllm_calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in (("list", "print the calls"), ("rehearse", "make the calls in a folder")):
        command = commands.add_parser(name, help=summary)
        command.add_argument("parts", type=Path, help="folder in this checkout with the parts")
        if name == "rehearse":
            command.add_argument("folder", type=Path, help="new folder that stands in for the card's machine")
        else:
            command.add_argument("--run", default="true", help="command of the last call, after the parts are joined")
    arguments = parser.parse_args(argv)
    try:
        parts = [str(part.resolve().relative_to(ROOT)) for part in sorted(arguments.parts.glob("part-*.bin"))]
        if not parts:
            raise ValueError(f"{arguments.parts} has no parts: see benchmarks/gpu/vllm_parts.py")
        if arguments.command == "list":
            for call in calls_of(parts, arguments.run):
                print(f"{' '.join(call.brings) or 'no further file'}: {call.command}")
            return 0
        arguments.folder.mkdir(parents=True)
        machine = FolderMachine(ROOT, arguments.folder.resolve())
        for call in calls_of(parts, "true", machine.stage):
            print(f"{' '.join(call.brings) or 'join'}: {machine.run(call)}", flush=True)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"benchmarks.gpu.vllm_calls: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
