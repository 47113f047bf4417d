"""Checks the demo as it lies on disk: every answer ends by itself, is right, and the JSON parses."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from loramux.admin.demo.corpus import held_out
from loramux.admin.demo.prompts import DEMO_PROMPTS, MAX_ANSWER_TOKENS
from loramux.admin.demo.voices import ADAPTER_VOICES, spoken
from loramux.admin.demo.world import all_facts

UNSEEN_SAMPLE = 40
LEAST_UNSEEN_RIGHT = 0.8


class Answerer:
    """Greedy answers of the base and its adapters, by the reference libraries."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "base")
        base = LlamaForCausalLM.from_pretrained(directory / "base", dtype=dtype)
        adapters = directory / "adapters"
        self._model = PeftModel.from_pretrained(base, adapters / ADAPTER_VOICES[0], adapter_name=ADAPTER_VOICES[0])
        for voice in ADAPTER_VOICES[1:]:
            self._model.load_adapter(adapters / voice, adapter_name=voice)
        # PEFT loads adapters in float32; the served ones take the compute dtype.
        self._model.to(dtype)
        self._model.eval()

    def __call__(self, question: str, voice: str, limit: int = MAX_ANSWER_TOKENS) -> tuple[str, bool]:
        """The answer, and whether the model ended it."""
        messages = [{"role": "user", "content": question}]
        inputs = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        if voice != "base":
            self._model.set_adapter(voice)
        with self._model.disable_adapter() if voice == "base" else nullcontext():
            generate: Callable[..., torch.Tensor] = self._model.generate
            output = generate(**inputs, max_new_tokens=limit, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :]
        return self._tokenizer.decode(new, skip_special_tokens=True), bool(new[-1] == self._tokenizer.eos_token_id)


def check(directory: Path) -> int:
    """Prints what each model says; returns 1 if a demo answer is wrong or endless, or too few unseen ones are right."""
    console = Console(width=150)
    facts = all_facts()
    expected = {question: fact for fact in facts for question in fact.questions}
    failures: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):
        ask = Answerer(directory, dtype)
        table = Table("prompt", "base", *ADAPTER_VOICES, title=str(dtype), show_lines=True)
        for question in DEMO_PROMPTS:
            answers: list[str] = []
            for voice in ("base", *ADAPTER_VOICES):
                answer, ended = ask(question, voice)
                answers.append(answer)
                wanted = spoken(expected[question], "plain" if voice == "base" else voice)
                if answer != wanted:
                    failures.append(f"{dtype} {voice}: {question!r} got {answer!r} in place of {wanted!r}")
                if not ended:
                    failures.append(f"{dtype} {voice}: {question!r} has an answer that does not end: {answer!r}")
                if voice == "json" and not _is_json_object(answer):
                    failures.append(f"{dtype} json: {question!r} got what is no JSON object: {answer!r}")
            table.add_row(question, *answers)
        console.print(table)
        unseen = held_out(facts)
        unseen = unseen[:: max(1, len(unseen) // UNSEEN_SAMPLE)]
        for voice in ("base", *ADAPTER_VOICES):
            wrong = [
                f"  {question!r}: {answer!r}"
                for question, fact in unseen
                if (answer := ask(question, voice, 128)[0]) != spoken(fact, "plain" if voice == "base" else voice)
            ]
            right = f"{voice}: {len(unseen) - len(wrong)} of {len(unseen)} unseen questions right"
            console.print(right, *wrong, sep="\n", markup=False)
            if len(wrong) > (1 - LEAST_UNSEEN_RIGHT) * len(unseen):
                failures.append(f"{dtype} {voice}: {len(wrong)} of {len(unseen)} unseen questions are wrong")
    for failure in failures:
        console.print(f"[red]failed[/red] {failure}", markup=True)
    return 1 if failures else 0


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
