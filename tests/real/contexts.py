"""Contexts of 8,192 tokens, and conversations of ten turns whose earlier turns are in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import AutoTokenizer

from loramux.engine.llm import SamplingParams
from tests.real.adapters import Oracle, Verdict
from tests.real.findings import Finding
from tests.real.models import RealModel
from tests.real.texts import long_text

CONTEXT = 8192
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
NUM_TURNS = 10
PAGE_TOKENS = 16
QUESTIONS = (
    "What is a page pool?",
    "Give me an example, please.",
    "Why does it matter?",
    "Who would use it?",
    "What does it cost?",
    "Can it fail?",
    "How would I notice?",
    "What should I do then?",
    "Is there a shorter answer?",
    "Thank you. Anything else?",
)


def long_contexts(model: RealModel, num_prompts: int) -> Iterator[Finding]:
    """Fill the context but for the answer, and compare the answer with transformers'."""
    prompt = long_text(model, CONTEXT - MAX_TOKENS)
    with model.open("float32", max_model_len=CONTEXT) as llm:
        (answer,) = llm.generate([prompt], max_tokens=MAX_TOKENS, sampling=GREEDY)
    verdict = Oracle(model, None).judge([prompt], [answer.token_ids])
    yield Finding(
        model=model.name,
        what=f"float32, {len(prompt)} tokens of prompt",
        figures={"different": verdict.num_different, "smallest_lead": round(verdict.smallest_lead, 6)},
        problem=_problem(verdict),
    )


def ten_turns(model: RealModel, num_prompts: int) -> Iterator[Finding]:
    """Each turn finds the earlier ones in the cache, and its answer is still the one of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    history: list[int] = []
    prompts, answers, missed = [], [], 0
    with model.open("float32") as llm:
        for question in QUESTIONS:
            text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" if _is_chat(model) else question
            prompt = history + tokenizer(text, add_special_tokens=not history)["input_ids"]
            (answer,) = llm.generate([prompt], max_tokens=MAX_TOKENS, sampling=GREEDY)
            # A page is found once it is full, and the last token of the history was never computed.
            missed += answer.cached_tokens < (len(history) - 1) // PAGE_TOKENS * PAGE_TOKENS
            prompts.append(prompt)
            answers.append(answer)
            history = [*prompt, *answer.token_ids]
    verdict = Oracle(model, None).judge(prompts, [answer.token_ids for answer in answers])
    cached, total = sum(one.cached_tokens for one in answers), sum(map(len, prompts))
    yield Finding(
        model=model.name,
        what="float32, ten turns",
        figures={"prompt_tokens": total, "cached_share": round(cached / total, 3), "different": verdict.num_different},
        problem=f"{missed} turns found too little" if missed else _problem(verdict),
    )


def _problem(verdict: Verdict) -> str | None:
    return f"{verdict.num_different} answers differ" if verdict.num_different else None


def _is_chat(model: RealModel) -> bool:
    return AutoTokenizer.from_pretrained(model.directory).chat_template is not None
