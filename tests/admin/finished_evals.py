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
    database: Database,
    adapter_id: str,
    number: int,
    passed: int,
    compared: int | None = None,
    others: int = 0,
    share_base_cache: int | None = None,
    judge: str | None = None,
) -> str:
    """Add a finished eval of four lines. The version passes `passed` of them, and `compared` passes `others`.

    With `share_base_cache`, the version itself passes `others` with this option, and the divergences of the lines are
    0.1, 0.2, 0.3 and 0.4.
    """
    file = read_cases(CONTENT)
    new = NewEval(
        name="tests.jsonl",
        sha256=file.sha256,
        content=CONTENT,
        num_cases=4,
        compared=compared,
        share_base_cache=share_base_cache,
        judge=judge,
    )
    found, claims = Evals(database).create(adapter_id, number, new), EvalClaims(database)
    assert claims.claim() is not None
    counts: Sequence[int] = (passed, others) if len(found.sides) == 2 else (passed,)
    for line in range(1, 5):
        for side, count in enumerate(counts):
            is_passed = line <= count
            text, divergence = "yes" if is_passed else "<b>no</b>", line * PPM // 10 if found.shared(side) else None
            answer = EvalAnswer(line, side, PPM * is_passed, is_passed, text, "", divergence)
            claims.record(found.id, answer)
    claims.finish(found.id)
    return found.id
