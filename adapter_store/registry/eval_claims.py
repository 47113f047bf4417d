"""SQL for running evals. Only one server at a time can claim an eval and store its answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select

from loramux.adapter_store.errors import ClaimLost
from loramux.adapter_store.registry.evals import (
    MAX_ANSWER,
    MAX_DETAIL,
    MAX_ERROR,
    UNFINISHED,
    Eval,
    EvalAnswer,
    ended,
    require_eval,
)
from loramux.migrations.claims import LEASE_US, NO_CLAIM, RowClaims
from loramux.migrations.database import Database
from loramux.migrations.schema import eval_answers, evals


@dataclass(frozen=True, slots=True)
class ClaimedEval:
    eval: Eval
    content: bytes
    answered: frozenset[tuple[int, int]]
    """The lines and sides that an earlier claim has stored answers for."""

    @property
    def id(self) -> str:
        return self.eval.id

    @property
    def tenant_id(self) -> str:
        return self.eval.tenant_id


class EvalClaims:
    """One server's claims. Blocking.

    queued -> running (claimed) -> done, failed or cancelled. Each answer is stored in its own transaction, which also
    renews the claim. If the server dies, another one continues after the last stored answer.
    """

    def __init__(self, database: Database, lease_us: int = LEASE_US) -> None:
        self._database = database
        self._rows = RowClaims(database, evals, UNFINISHED, lease_us)
        self.lease_s = self._rows.lease_s

    def claim(self, but_tenants: Collection[str] = ()) -> ClaimedEval | None:
        """Claim the oldest eval that no server runs, except those of `but_tenants`."""
        eval_id = self._rows.find(but_tenants)
        if eval_id is None:
            return None
        with self._database.write() as connection:
            if not self._rows.claim(connection, eval_id, {"state": "running"}):
                return None
            content = connection.execute(select(evals.c.content).where(evals.c.id == eval_id)).scalar_one()
            table = eval_answers.c
            stored = connection.execute(select(table.line, table.side).where(table.eval_id == eval_id))
            answered = frozenset((row.line, row.side) for row in stored)
            return ClaimedEval(require_eval(connection, eval_id), bytes(content), answered)

    def renew(self, eval_id: str) -> None:
        """Extend the claim. Raises ClaimLost."""
        with self._database.write() as connection:
            self._change(connection, eval_id, {})

    def give_back(self, eval_id: str) -> None:
        """Return a running eval to the queue. Raises ClaimLost."""
        with self._database.write() as connection:
            self._change(connection, eval_id, {"state": "queued", **NO_CLAIM})

    def record(self, eval_id: str, answer: EvalAnswer) -> None:
        """Store an answer and renew the claim. Raises ClaimLost, for example if the eval has been cancelled."""
        with self._database.write() as connection:
            self._change(connection, eval_id, {"num_answers": evals.c.num_answers + 1})
            connection.execute(
                insert(eval_answers).values(
                    eval_id=eval_id,
                    line=answer.line,
                    side=answer.side,
                    score_ppm=answer.score_ppm,
                    is_passed=int(answer.is_passed),
                    answer=_storable(answer.answer, MAX_ANSWER),
                    detail=_storable(answer.detail, MAX_DETAIL),
                    divergence_ppm=answer.divergence_ppm,
                )
            )

    def finish(self, eval_id: str) -> None:
        """Compute the scores from the stored answers, and end the eval. Raises ClaimLost."""
        table = eval_answers.c
        sums = (
            select(table.side, func.sum(table.score_ppm).label("total"), func.sum(table.is_passed).label("passed"))
            .where(table.eval_id == eval_id)
            .group_by(table.side)
        )
        with self._database.write() as connection:
            ran = require_eval(connection, eval_id)
            sides = connection.execute(sums).all()
            found = {row.side: (int(row.total) // ran.num_cases, int(row.passed)) for row in sides}
            (score, passed), (compared, others) = found.get(0, (0, 0)), found.get(1, (None, None))
            measured = select(func.avg(table.divergence_ppm), func.count(table.divergence_ppm))
            divergence, num_measured = connection.execute(measured.where(table.eval_id == eval_id)).one()
            scores = {
                "score_ppm": score,
                "num_passed": passed,
                "compared_ppm": compared,
                "compared_passed": others,
                "divergence_ppm": None if divergence is None else round(divergence),
                "num_measured": None if ran.share_base_cache is None else num_measured,
            }
            self._change(connection, eval_id, {**ended("done", self._database.now_us(connection)), **scores})

    def fail(self, eval_id: str, code: str, message: str) -> None:
        """End an eval that cannot be run. Raises ClaimLost."""
        with self._database.write() as connection:
            error = {"error_code": code[:64], "error": _storable(message, MAX_ERROR)}
            self._change(connection, eval_id, {**ended("failed", self._database.now_us(connection)), **error})

    def _change(self, connection: Connection, eval_id: str, values: Mapping[str, Any]) -> None:
        if not self._rows.change(connection, eval_id, values):
            raise ClaimLost("the eval was cancelled, or another server has taken it over")


def _storable(text: str, max_characters: int) -> str:
    # PostgreSQL cannot store NUL in a text, and a model can generate it.
    return text[:max_characters].replace("\x00", "\ufffd")
