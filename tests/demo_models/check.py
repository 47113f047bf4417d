"""Checks the demo model on disk by asking it questions."""

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from peft import PeftModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from loramux.admin.demo.prompts import DEMO_PROMPTS, MAX_ANSWER_TOKENS
from tests.demo_models.corpus import held_out
from tests.demo_models.facts import all_facts
from tests.demo_models.styles import ADAPTER_STYLES, answer_in_style

UNSEEN_SAMPLE = 40
# Low enough to catch only regressions: the shipped weights score 37, 38, 37 and 32.
LEAST_UNSEEN_RIGHT = 30
MAX_UNSEEN_TOKENS = 128
STYLES = ("base", *ADAPTER_STYLES)


class Answerer:
    """Answers questions greedily with the base and its adapters, using transformers and PEFT as the reference."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "base")
        base = LlamaForCausalLM.from_pretrained(directory / "base", dtype=dtype)
        adapters = directory / "adapters"
        self._model = PeftModel.from_pretrained(base, adapters / ADAPTER_STYLES[0], adapter_name=ADAPTER_STYLES[0])
        for style in ADAPTER_STYLES[1:]:
            self._model.load_adapter(adapters / style, adapter_name=style)
        # PEFT loads adapters in float32. Served adapters use the compute dtype.
        self._model.to(dtype)
        self._model.eval()

    def __call__(self, question: str, style: str, limit: int) -> tuple[str, bool]:
        """Return the answer, and whether the model ended it with <|end|>."""
        messages = [{"role": "user", "content": question}]
        inputs = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        if style != "base":
            self._model.set_adapter(style)
        with self._model.disable_adapter() if style == "base" else nullcontext():
            generate: Callable[..., torch.Tensor] = self._model.generate
            output = generate(**inputs, max_new_tokens=limit, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :]
        return self._tokenizer.decode(new, skip_special_tokens=True), bool(new[-1] == self._tokenizer.eos_token_id)


def check(directory: Path) -> int:
    """Print the answers of the base and the adapters. Return 1 if a check fails, otherwise 0.

    The model must end each answer with <|end|>, and the json adapter's answers must parse. All answers to the demo
    prompts must match exactly. In each style, at least LEAST_UNSEEN_RIGHT answers to unseen questions must match.
    """
    console = Console(width=150)
    expected = {question: fact for fact in all_facts() for question in fact.questions}
    unseen = random.Random(0).sample([question for question, _ in held_out(all_facts())], UNSEEN_SAMPLE)
    failures: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):
        ask = Answerer(directory, dtype)
        answers: dict[tuple[str, str], str] = {}
        wrong: dict[str, list[str]] = {style: [] for style in STYLES}
        for style in STYLES:
            for question in (*DEMO_PROMPTS, *unseen):
                limit = MAX_ANSWER_TOKENS if question in DEMO_PROMPTS else MAX_UNSEEN_TOKENS
                answer, ended = ask(question, style, limit)
                answers[question, style] = answer
                said = f"{dtype} {style}: {question!r} -> {answer!r}"
                if not ended:
                    failures.append(f"{said} does not end")
                if style == "json" and not _is_json_object(answer):
                    failures.append(f"{said} is not a JSON object")
                if answer != answer_in_style(expected[question], "plain" if style == "base" else style):
                    (failures if question in DEMO_PROMPTS else wrong[style]).append(f"{said} is wrong")
        table = Table("prompt", *STYLES, title=str(dtype), show_lines=True)
        for question in DEMO_PROMPTS:
            table.add_row(question, *(escape(answers[question, style]) for style in STYLES))
        console.print(table)
        for style in STYLES:
            right = UNSEEN_SAMPLE - len(wrong[style])
            title = f"{style}: {right} of {UNSEEN_SAMPLE} unseen questions right"
            console.print(title, *wrong[style], sep="\n  ", markup=False)
            if right < LEAST_UNSEEN_RIGHT:
                failures.append(f"{dtype} {style}: only {right} of {UNSEEN_SAMPLE} unseen questions right")
    for failure in failures:
        console.print(f"[red]failed[/red] {escape(failure)}")
    return 1 if failures else 0


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
