"""Evals whose answers are stored without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence

from loramux.adapter_store.registry.eval_claims import EvalClaims
from loramux.adapter_store.registry.evals import PPM, EvalAnswer, Evals, NewEval
from loramux.migrations.database import Database
from loramux.platform.evals.cases import read_cases

CONTENT = b"\n".join(json.dumps({"prompt": f"p{line}", "equal": "yes"}).encode() for line in range(4))
SHA256 = read_cases(CONTENT).sha256


def add_finished_eval(
    database: Database, adapter_id: str, number: int, passed: int, compared: int | None = None, others: int = 0
) -> str:
    """Add a finished eval of four lines. The version passes `passed` of them, and `compared` passes `others`."""
    file = read_cases(CONTENT)
    new = NewEval(name="tests.jsonl", sha256=file.sha256, content=CONTENT, num_cases=4, compared=compared)
    found, claims = Evals(database).create(adapter_id, number, new), EvalClaims(database)
    assert claims.claim() is not None
    counts: Sequence[int] = (passed,) if compared is None else (passed, others)
    for line in range(1, 5):
        for side, count in enumerate(counts):
            is_passed = line <= count
            answer = EvalAnswer(line, side, PPM * is_passed, is_passed, "yes" if is_passed else "<b>no</b>", "")
            claims.record(found.id, answer)
    claims.finish(found.id)
    return found.id
