"""Reads the few instructions that our Dockerfile uses."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    name: str
    value: str

    @property
    def words(self) -> list[str]:
        return list(json.loads(self.value)) if self.value.startswith("[") else self.value.split()


@dataclass(frozen=True)
class Stage:
    name: str
    base: str
    instructions: tuple[Instruction, ...]


def read_stages(path: Path) -> dict[str, Stage]:
    """The stages by name, in file order."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", "", text).splitlines()
    instructions = [Instruction(*line.split(maxsplit=1)) for line in lines if line.strip()]
    stages: dict[str, Stage] = {}
    for instruction in instructions:
        if instruction.name == "FROM":
            base, _, name = instruction.words
            stages[name] = Stage(name, base, ())
        else:
            last = stages[next(reversed(stages))]
            stages[last.name] = Stage(last.name, last.base, (*last.instructions, instruction))
    return stages
