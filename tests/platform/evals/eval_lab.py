"""Evals on a gateway whose scripted engine answers with given texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from loramux.adapter_store.registry.eval_claims import EvalClaims
from loramux.adapter_store.registry.evals import Eval, EvalAnswer, Evals, NewEval
from loramux.engine.protocol.messages import Add
from loramux.migrations.database import Database
from loramux.platform.evals.cases import read_cases
from loramux.platform.evals.runner import EvalRunner, Patience
from tests.platform.gateways import Gateway
from tests.platform.ready_adapters import digest_of
from tests.platform.scripted_engine import Script

PATIENCE = Patience(answer_s=60, refusal_s=0.5, queue_s=0.5, poll_s=0.02, look_s=0.02)


@dataclass
class EvalLab:
    """`texts` are the answers of `acme/support@NUMBER` by number, or of the base (0)."""

    gateway: Gateway
    adapter_id: str
    patience: Patience = PATIENCE

    @property
    def database(self) -> Database:
        return self.gateway.database

    @property
    def evals(self) -> Evals:
        return Evals(self.database)

    def runner(self, lease_us: int = 30_000_000) -> EvalRunner:
        services = self.gateway.services
        return EvalRunner(services, EvalClaims(self.database, lease_us), services.metrics.evals, self.patience)

    def answer_with(self, texts: Mapping[int, str], **script: Any) -> None:
        tokenizer = self.gateway.services.prompts.tokenizer
        numbers = {digest_of(f"acme/support@{number}"): number for number in (1, 2)}

        def answer(add: Add) -> Script:
            text = texts[numbers.get(add.digest or "", 0)]
            return Script(token_ids=tokenizer.encode(text, add_special_tokens=False), **script)

        self.gateway.engine.script = answer

    def create(self, cases: list[dict[str, Any]], key_id: str | None = None, **options: Any) -> Eval:
        content = "\n".join(json.dumps(case) for case in cases).encode()
        file = read_cases(content)
        new = NewEval(
            name="tests.jsonl",
            sha256=file.sha256,
            content=content,
            num_cases=len(file.cases),
            api_key_id=key_id,
            **options,
        )
        return self.evals.create(self.adapter_id, 1, new)

    def answers(self, found: Eval) -> list[EvalAnswer]:
        return list(self.evals.answers(found.id, 1000)[0])

    async def finished(self, found: Eval) -> Eval:
        return await self.until(found, lambda now: now.finished_us is not None)

    async def until(self, found: Eval, is_so: Callable[[Eval], bool]) -> Eval:
        async with asyncio.timeout(60):
            while not is_so(now := self.evals.get(found.id)):  # noqa: ASYNC110 - the database sets no event
                await asyncio.sleep(0.02)
        return now

    @asynccontextmanager
    async def running(self, lease_us: int = 30_000_000) -> Any:
        task = asyncio.create_task(self.runner(lease_us).run(asyncio.Event()))
        yield
        task.cancel()
        await asyncio.wait({task})
