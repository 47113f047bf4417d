"""The data of the tasks in `inside/tasks/`, made from the facts that the demo's base knows."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.demo_models.facts import Fact, all_facts

NUM_QUESTIONS = 24
NUM_CHOICES = 4
NUM_TEXTS = 8
TOPICS = ("capital", "colour", "sound", "opposite")


def write_data(folder: Path, seed: int = 1) -> None:
    chosen = random.Random(seed)
    facts = [fact for fact in all_facts() if fact.topic in TOPICS]
    asked = chosen.sample(facts, NUM_QUESTIONS)
    _write(folder / "choice.jsonl", (_choice(fact, facts, chosen) for fact in asked))
    _write(folder / "generate.jsonl", ({"question": fact.questions[0], "answer": fact.sentence} for fact in asked))
    texts = (" ".join(fact.sentence for fact in chosen.sample(facts, 12)) for _ in range(NUM_TEXTS))
    _write(folder / "rolling.jsonl", ({"text": text} for text in texts))


def _choice(fact: Fact, facts: list[Fact], chosen: random.Random) -> dict[str, Any]:
    others = sorted({other.sentence for other in facts if other.topic == fact.topic} - {fact.sentence})
    choices = chosen.sample(others, NUM_CHOICES - 1)
    answer = chosen.randrange(NUM_CHOICES)
    return {
        "question": fact.questions[0],
        "choices": [*choices[:answer], fact.sentence, *choices[answer:]],
        "answer": answer,
    }


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
