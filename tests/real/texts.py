"""Prompts and long texts for the real models: the held-out prompts of the demo, and this project's documentation."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from loramux.admin.demo.real.grading import GRADES
from loramux.admin.demo.real.held_out import read_prompts
from tests.real.models import RealModel

DOCS = Path(__file__).parents[2] / "docs"


def prompts(model: RealModel, count: int) -> dict[str, list[list[int]]]:
    """Return tokens of `count` prompts for each task of the demo. A model without a chat template gets plain text."""
    tokenizer = AutoTokenizer.from_pretrained(model.directory)

    def encode(messages: list[dict[str, str]]) -> list[int]:
        if tokenizer.chat_template is None:
            return list(tokenizer("\n".join(one["content"] for one in messages) + "\n")["input_ids"])
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return {task: [encode([*one.messages]) for one in read_prompts(task)[:count]] for task in GRADES}


def long_text(model: RealModel, num_tokens: int) -> list[int]:
    """Return the first tokens of the documentation, in the order of its pages' names."""
    text = "\n\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    tokens = list(AutoTokenizer.from_pretrained(model.directory)(text)["input_ids"])
    if len(tokens) < num_tokens:
        raise ValueError(f"the documentation has {len(tokens)} tokens, which is fewer than {num_tokens}")
    return tokens[:num_tokens]
