"""SQL for running evals. Only one server at a time can claim an eval and store its answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, insert, or_, select, update

from loramux.adapter_store.errors import ClaimLost
from loramux.adapter_store.registry.evals import (
    MAX_ANSWER,
    MAX_DETAIL,
    MAX_ERROR,
    Eval,
    EvalAnswer,
    ended,
    require_eval,
)
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import eval_answers, evals

LEASE_US = 30_000_000
"""Duration of a claim that is not renewed, in microseconds."""


@dataclass(frozen=True, slots=True)
class ClaimedEval:
    eval: Eval
    content: bytes
    answered: frozenset[tuple[int, int]]
    """The lines and sides that an earlier claim has stored answers for."""


class EvalClaims:
    """One server's claims. Blocking.

    queued -> running (claimed) -> done, failed or cancelled. Each answer is stored in its own transaction, which also
    renews the claim. If the server dies, another one continues after the last stored answer.
    """

    def __init__(self, database: Database, lease_us: int = LEASE_US) -> None:
        self._database = database
        self._lease_us = lease_us
        self.server_id = new_id("srv")
        """Unique to this process. After a restart, earlier claims count as another server's."""

    @property
    def lease_s(self) -> float:
        return self._lease_us / 1_000_000

    def claim(self, but_tenants: Collection[str] = ()) -> ClaimedEval | None:
        """Claim the oldest eval that no server runs, except those of `but_tenants`."""
        # Read first, because servers look often, and a writing transaction would delay reservations on SQLite.
        with self._database.read() as connection:
            is_free = _is_free(self._database.now_us(connection))
            query = select(evals.c.id).where(is_free, evals.c.tenant_id.not_in(but_tenants))
            eval_id = connection.scalar(query.order_by(evals.c.id).limit(1))
        if eval_id is None:
            return None
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            claimed = {"state": "running", "claimed_by": self.server_id, "claim_expires_us": now_us + self._lease_us}
            taken = connection.execute(update(evals).where(evals.c.id == eval_id, _is_free(now_us)).values(claimed))
            if taken.rowcount == 0:
                return None
            content = connection.execute(select(evals.c.content).where(evals.c.id == eval_id)).scalar_one()
            table = eval_answers.c
            stored = connection.execute(select(table.line, table.side).where(table.eval_id == eval_id))
            answered = frozenset((row.line, row.side) for row in stored)
            return ClaimedEval(require_eval(connection, eval_id), bytes(content), answered)

    def renew(self, eval_id: str) -> None:
        """Extend the claim. Raises ClaimLost."""
        with self._database.write() as connection:
            self._change(connection, eval_id, {"claim_expires_us": self._database.now_us(connection) + self._lease_us})

    def give_back(self, eval_id: str) -> None:
        """Return a running eval to the queue. Raises ClaimLost."""
        with self._database.write() as connection:
            self._change(connection, eval_id, {"state": "queued", "claimed_by": None, "claim_expires_us": None})

    def record(self, eval_id: str, answer: EvalAnswer) -> None:
        """Store an answer and renew the claim. Raises ClaimLost, for example if the eval has been cancelled."""
        with self._database.write() as connection:
            expires_us = self._database.now_us(connection) + self._lease_us
            change = {"claim_expires_us": expires_us, "num_answers": evals.c.num_answers + 1}
            self._change(connection, eval_id, change)
            connection.execute(
                insert(eval_answers).values(
                    eval_id=eval_id,
                    line=answer.line,
                    side=answer.side,
                    score_ppm=answer.score_ppm,
                    is_passed=int(answer.is_passed),
                    answer=_storable(answer.answer, MAX_ANSWER),
                    detail=_storable(answer.detail, MAX_DETAIL),
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
            num_cases = require_eval(connection, eval_id).num_cases
            found = {row.side: (int(row.total) // num_cases, int(row.passed)) for row in connection.execute(sums).all()}
            (score, passed), (compared, others) = found.get(0, (0, 0)), found.get(1, (None, None))
            scores = {"score_ppm": score, "num_passed": passed, "compared_ppm": compared, "compared_passed": others}
            self._change(connection, eval_id, {**ended("done", self._database.now_us(connection)), **scores})

    def fail(self, eval_id: str, code: str, message: str) -> None:
        """End an eval that cannot be run. Raises ClaimLost."""
        with self._database.write() as connection:
            error = {"error_code": code[:64], "error": _storable(message, MAX_ERROR)}
            self._change(connection, eval_id, {**ended("failed", self._database.now_us(connection)), **error})

    def _change(self, connection: Connection, eval_id: str, values: Mapping[str, Any]) -> None:
        is_own = (evals.c.id == eval_id, evals.c.state == "running", evals.c.claimed_by == self.server_id)
        if connection.execute(update(evals).where(*is_own).values(values)).rowcount == 0:
            raise ClaimLost("the eval was cancelled, or another server has taken it over")


def _is_free(now_us: int) -> ColumnElement[bool]:
    is_abandoned = and_(evals.c.state == "running", evals.c.claim_expires_us < now_us)
    return or_(evals.c.state == "queued", is_abandoned)


def _storable(text: str, max_characters: int) -> str:
    # PostgreSQL cannot store NUL in a text, and a model can generate it.
    return text[:max_characters].replace("\x00", "\ufffd")
