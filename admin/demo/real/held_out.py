"""The prompts that no adapter was trained on, with what is expected."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PROMPTS, ADAPTERS = FOLDER / "prompts", FOLDER / "adapters"


@dataclass(frozen=True, slots=True)
class Prompt:
    messages: Sequence[Mapping[str, str]]
    expected: str


def read_prompts(adapter: str) -> list[Prompt]:
    lines = (PROMPTS / f"{adapter}.jsonl").read_text().splitlines()
    return [Prompt(**json.loads(line)) for line in lines]
