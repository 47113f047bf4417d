"""Greedy answers in mixed batches equal those of transformers and peft in float32."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from loramux.engine.llm import SamplingParams
from tests.real.adapters import NUM_ADDED, Oracle, has_tokens, make_adapters
from tests.real.findings import Finding
from tests.real.models import RealModel
from tests.real.texts import prompts

MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
CHANGED = 0.5
"""The least share of answers that an adapter must change: an adapter without effect would prove nothing."""


def equality(model: RealModel, num_prompts: int, formats: tuple[str, ...] = ("float32", "gguf")) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(model, Path(folder))
        asked = dict(zip(adapters, prompts(model, num_prompts).values(), strict=True))
        answers = {kind: _answers(model, kind, adapters, asked) for kind in formats}
        # The base answers the prompts that have no added tokens, for comparison.
        for name, adapter in adapters.items():
            verdict = Oracle(model, adapter).judge(_with_added(model, name, asked[name]), answers[formats[0]][name])
            bases = answers[formats[0]][f"{name} base"]
            changed = sum(one != base for one, base in zip(answers[formats[0]][name], bases, strict=True))
            for kind in formats:
                differs = sum(a != b for a, b in zip(answers[kind][name], answers[formats[0]][name], strict=True))
                wrong = verdict.num_different if kind == formats[0] else differs
                yield Finding(
                    model=model.name,
                    what=f"{kind}, {name}",
                    figures={
                        "answers": len(asked[name]),
                        "different": wrong,
                        "changed_by_adapter": changed,
                        "smallest_lead": round(verdict.smallest_lead, 6),
                    },
                    problem=_problem(wrong, changed, len(asked[name])),
                )


def _problem(num_wrong: int, num_changed: int, num_prompts: int) -> str | None:
    if num_wrong:
        return f"{num_wrong} answers differ"
    return "the adapter changes too few answers" if num_changed < CHANGED * num_prompts else None


def _answers(
    model: RealModel, kind: str, adapters: dict[str, Path], asked: dict[str, list[list[int]]]
) -> dict[str, list[tuple[int, ...]]]:
    """Ask all adapters and the base in one call, in turns, so that every step has rows of several adapters."""
    names = [name for adapter in adapters for name in (adapter, f"{adapter} base")]
    rows = [
        (name, prompt)
        for place in zip(*(_with_added(model, name, asked[name.removesuffix(" base")]) for name in names), strict=True)
        for name, prompt in zip(names, place, strict=True)
    ]
    with model.open(kind, adapters) as llm:
        used = [None if name.endswith(" base") else name for name, _ in rows]
        made = llm.generate([prompt for _, prompt in rows], adapter=used, max_tokens=MAX_TOKENS, sampling=GREEDY)
    answers: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}
    for (name, _), generation in zip(rows, made, strict=True):
        answers[name].append(generation.token_ids)
    return answers


def _with_added(model: RealModel, name: str, asked: list[list[int]]) -> list[list[int]]:
    """Put the adapter's own tokens before the last token of the prompts, if it has some."""
    if not has_tokens(name):
        return asked
    from loramux.engine.architectures.model_config import ModelConfig

    vocab_size = ModelConfig.load(model.directory).vocab_size
    added = list(range(vocab_size, vocab_size + NUM_ADDED))
    return [[*prompt[:-1], *added, prompt[-1]] for prompt in asked]
