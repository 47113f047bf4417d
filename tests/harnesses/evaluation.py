"""lm-eval over HTTP, compared with its own Hugging Face backend on the same files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tests.harnesses.finding import Finding
from tests.harnesses.shop_tasks import write_data
from tests.harnesses.tools import INSIDE, run_tool
from tests.strangers.stand import Served

TOLERANCE = 0.01
"""Highest difference of a metric, and of one document's log-likelihood."""
SCORED = ("shop_choice", "shop_rolling")
GENERATED = ("shop_generate",)


@dataclass(frozen=True, slots=True)
class Evaluated:
    metrics: dict[str, float]
    results: dict[str, list[list[Any]]]


def evaluations(served: Served, scratch: Path) -> Iterator[Finding]:
    write_data(scratch)
    for name, adapter in ((served.model, None), (served.adapter, served.adapter_folder)):
        # The two backends have different defaults for the start token.
        local = {"add_bos_token": True, "pretrained": served.folder, "dtype": "float32", "device": "cpu"} | (
            {"peft": adapter} if adapter else {}
        )
        remote = {
            "model": name,
            "add_bos_token": True,
            "base_url": f"{served.url}/v1/completions",
            "tokenizer": served.folder,
            "header": {"Authorization": f"Bearer {served.key}"},
        }
        for way, model, tasks in (
            ("completions", "local-completions", (*SCORED, *GENERATED)),
            ("chat", "local-chat-completions", GENERATED),
        ):
            is_chat = way == "chat"
            if is_chat:
                remote["base_url"] = f"{served.url}/v1/chat/completions"
            ours = _evaluate(model, remote, tasks, is_chat, scratch)
            theirs = _evaluate("hf", local, tasks, is_chat, scratch)
            yield from _compared(f"{name}, {way}", ours, theirs)


def _evaluate(
    model: str, model_args: dict[str, Any], tasks: tuple[str, ...], is_chat: bool, scratch: Path
) -> Evaluated:
    out = scratch / "evaluated.json"
    given = {"model": model, "model_args": model_args, "tasks": list(tasks), "is_chat": is_chat, "out": str(out)}
    run_tool("lm-eval", ["python", str(INSIDE / "run_lm_eval.py")], scratch, given=json.dumps(given))
    return Evaluated(**json.loads(out.read_text()))


def _compared(what: str, ours: Evaluated, theirs: Evaluated) -> Iterator[Finding]:
    assert ours.metrics.keys() == theirs.metrics.keys()
    assert ours.metrics
    for metric, value in ours.metrics.items():
        expected = theirs.metrics[metric]
        is_right = abs(value - expected) <= TOLERANCE
        yield Finding("lm-eval", f"{what}: {metric}", f"{value:.4f}", f"{expected:.4f}", is_right)
    for task, documents in ours.results.items():
        pairs = list(zip(chain(*documents), chain(*theirs.results[task]), strict=True))
        scores = [abs(float(a) - float(b)) for a, b in pairs if _is_number(a)]
        equal = sum(a == b for a, b in pairs if not _is_number(a))
        if scores:
            found = f"{max(scores):.1e} at most"
            is_right = max(scores) <= TOLERANCE
            yield Finding(
                "lm-eval", f"{what}: {task}, {len(scores)} log-likelihoods differ by", found, f"{TOLERANCE}", is_right
            )
        if len(pairs) > len(scores):
            num_others = len(pairs) - len(scores)
            kind = "texts" if task in GENERATED else "greedy flags"
            yield Finding("lm-eval", f"{what}: {task}, equal {kind}", str(equal), str(num_others), equal == num_others)


def _is_number(value: Any) -> bool:
    """Greedy flags are written as texts or booleans, depending on the backend."""
    try:
        float(value)
    except ValueError:
        return False
    return not isinstance(value, bool)
