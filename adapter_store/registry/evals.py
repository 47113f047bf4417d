"""Evals: runs of a version on a file of prompts with expected answers, and their stored results."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Row, and_, delete, func, insert, or_, select, update

from loramux.adapter_store.errors import (
    EvalNotFound,
    EvalNotPassed,
    InvalidEval,
    LimitReached,
    VersionNotFound,
    VersionNotReady,
)
from loramux.adapter_store.registry import base_sharing
from loramux.adapter_store.registry.base_sharing import why_not_shared
from loramux.adapter_store.registry.records import AliasTarget, RequiredEval
from loramux.adapter_store.registry.registry import MAX_VERSION, is_identifier, lock_adapter, owner_of
from loramux.migrations.audit import audit
from loramux.migrations.claims import NO_CLAIM
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_page
from loramux.migrations.schema import adapter_versions, adapters, eval_answers, evals, tenants

EvalState = Literal["queued", "running", "done", "failed", "cancelled"]

UNFINISHED: tuple[EvalState, ...] = ("queued", "running")

MAX_OPEN_EVALS = 4
"""Maximum number of a tenant's queued and running evals."""

MAX_KEPT_EVALS = 20
"""Number of a version's finished evals that are kept. A new eval deletes older ones."""

MAX_ANSWER, MAX_DETAIL, MAX_ERROR = 1000, 300, 500
"""Maximum lengths of stored texts, in characters."""

RETRY_S = 60.0
PPM = 1_000_000

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}")
_LIKE_SECRET = re.compile(
    r"(^|[^a-z0-9])(sk|pk|hf|gh[a-z])[-_]|(?=[a-z]*[0-9])(?=[0-9]*[a-z])[a-z0-9]{20}", re.IGNORECASE
)
"""Prefixes of well-known keys, and long runs of letters and digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEval:
    """A file to run a version on. `compared` is the number of another version that answers the same prompts.

    With `share_base_cache`, the same version answers them a second time, with an alias's option of this name.
    """

    name: str
    sha256: str
    content: bytes
    num_cases: int
    judge: str | None = None
    compared: int | None = None
    share_base_cache: int | None = None
    api_key_id: str | None = None
    """The tenant's key that pays. None if the operator runs the eval."""
    created_by: str = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eval:
    """One eval. Scores are in millionths, and are None until the eval is done.

    With `share_base_cache`, `compared` is the version itself, which answers a second time with this option.
    `divergence_ppm` is the mean KL divergence that the option causes, in millionths of a nat per token, over the
    `num_measured` lines on which it could be measured, or None if there are none.
    """

    id: str
    tenant_id: str
    tenant_slug: str
    adapter_id: str
    adapter_name: str
    version: int
    compared: int | None
    name: str
    sha256: str
    judge: str | None
    state: EvalState
    num_cases: int
    num_answers: int
    score_ppm: int | None
    num_passed: int | None
    compared_ppm: int | None
    compared_passed: int | None
    share_base_cache: int | None
    divergence_ppm: int | None
    num_measured: int | None
    api_key_id: str | None
    created_by: str
    error_code: str | None
    error: str | None
    created_us: int
    finished_us: int | None

    @property
    def sides(self) -> tuple[int, ...]:
        return (0,) if self.compared is None else (0, 1)

    def model(self, side: int) -> str:
        """The name of the version that answers on this side."""
        return f"{self.tenant_slug}/{self.adapter_name}@{self.compared if side else self.version}"

    def shared(self, side: int) -> int | None:
        """The `share_base_cache` of the answers on this side."""
        return self.share_base_cache if side else None


@dataclass(frozen=True, slots=True)
class EvalAnswer:
    """The graded answer to one line of the file."""

    line: int
    side: int
    score_ppm: int
    is_passed: bool
    answer: str
    detail: str
    divergence_ppm: int | None = None
    """Mean KL divergence of `share_base_cache` on this line. None if it has not been measured."""


class Evals:
    """Queues, lists and cancels evals. Blocking. `EvalClaims` runs them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, adapter_id: str, number: int, new: NewEval) -> Eval:
        """Queue an eval. Raises AdapterNotFound, VersionNotFound, VersionNotReady, InvalidEval or LimitReached."""
        if new.compared == number:
            raise InvalidEval("invalid_comparison", "a version cannot be compared with itself", "compare")
        if new.compared is not None and new.share_base_cache is not None:
            raise InvalidEval("invalid_comparison", "specify either compare or share_base_cache", base_sharing.PARAM)
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            version_id = _ready_version(connection, adapter_id, number)
            compared_id = None if new.compared is None else _ready_version(connection, adapter_id, new.compared)
            if new.share_base_cache is not None:
                why = why_not_shared(connection, [version_id])
                if why is not None:
                    raise InvalidEval(base_sharing.CODE, why, base_sharing.PARAM)
                compared_id = version_id
            tenant_id = connection.execute(select(owner_of(adapter_id))).scalar_one()
            is_open = and_(evals.c.tenant_id == tenant_id, evals.c.state.in_(UNFINISHED))
            if connection.execute(select(func.count()).where(is_open)).scalar_one() >= MAX_OPEN_EVALS:
                message = f"{MAX_OPEN_EVALS} evals of this tenant are already waiting or running"
                raise LimitReached("too_many_evals", message, RETRY_S)
            _delete_older(connection, version_id)
            eval_id, now_us = new_id("evl"), self._database.now_us(connection)
            connection.execute(
                insert(evals).values(
                    id=eval_id,
                    version_id=version_id,
                    compared_id=compared_id,
                    share_base_cache=new.share_base_cache,
                    tenant_id=tenant_id,
                    name=safe_name(new.name, new.sha256),
                    sha256=new.sha256,
                    judge=new.judge,
                    state="queued",
                    content=new.content,
                    num_cases=new.num_cases,
                    num_answers=0,
                    api_key_id=new.api_key_id,
                    created_by=new.created_by,
                    created_us=now_us,
                )
            )
            after = {"file": new.sha256[:12], "cases": new.num_cases, "compared": new.compared}
            if new.share_base_cache is not None:
                after["share_base_cache"] = new.share_base_cache
            audit(connection, now_us, "eval.create", f"{adapter_id}@{number}", tenant_id=tenant_id, after=after)
            return require_eval(connection, eval_id)

    def get(self, eval_id: str) -> Eval:
        """Raises EvalNotFound."""
        with self._database.read() as connection:
            return require_eval(connection, eval_id)

    def list(
        self,
        adapter_id: str,
        number: int | None,
        limit: int,
        after: str | None = None,
        before: str | None = None,
    ) -> Page[Eval]:
        """List the evals of an adapter or of one of its versions, newest first."""
        versions = adapter_versions.c
        query = _select().where(versions.adapter_id == adapter_id)
        if number is not None:
            query = query.where(versions.number == number)
        with self._database.read() as connection:
            return keyset_page(connection, query, evals.c.id, _eval, limit, after, before)

    def newest(self, adapter_id: str, numbers: Collection[int]) -> Page[Eval]:
        """Return the newest finished eval of each of these versions that has one."""
        versions = adapter_versions.c
        newest = (
            select(func.max(evals.c.id))
            .join(adapter_versions, versions.id == evals.c.version_id)
            .where(versions.adapter_id == adapter_id, versions.number.in_(numbers), evals.c.state == "done")
            .group_by(evals.c.version_id)
        )
        with self._database.read() as connection:
            rows = connection.execute(_select().where(evals.c.id.in_(newest)).order_by(evals.c.id.desc())).all()
        return Page(tuple(_eval(row) for row in rows), False)

    def answers(self, eval_id: str, limit: int, after_line: int = 0) -> tuple[Sequence[EvalAnswer], bool]:
        """List stored answers by line, and say whether there are more lines."""
        table = eval_answers.c
        last = (
            select(table.line).distinct().where(table.eval_id == eval_id, table.line > after_line).order_by(table.line)
        )
        with self._database.read() as connection:
            lines = connection.scalars(last.limit(limit + 1)).all()
            shown = lines[:limit]
            query = select(eval_answers).where(table.eval_id == eval_id, table.line.in_(shown))
            rows = connection.execute(query.order_by(table.line, table.side)).all() if shown else []
        return [_answer(row) for row in rows], len(lines) > limit

    def cancel(self, eval_id: str) -> Eval:
        """Cancel an eval that has not finished. A finished one stays as it is. Raises EvalNotFound."""
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            changed = _end(connection, evals.c.id == eval_id, "cancelled", now_us)
            found = require_eval(connection, eval_id)
            if changed:
                target = f"{found.adapter_id}@{found.version}"
                audit(connection, now_us, "eval.cancel", target, tenant_id=found.tenant_id, after={"eval": eval_id})
            return found


def safe_name(name: str, sha256: str) -> str:
    """Return a file's name, or one made from its checksum if the name is unusual or may contain a secret."""
    is_plain = _PLAIN_NAME.fullmatch(name) is not None and _LIKE_SECRET.search(name) is None
    return name if is_plain else f"eval-{sha256[:12]}"


def check_passed(connection: Connection, target: AliasTarget, wanted: RequiredEval) -> None:
    """Raise EvalNotPassed unless the version's newest finished eval of the file, by the demanded judge, has at least
    the score.
    """
    query = select(evals.c.judge, evals.c.score_ppm).where(
        evals.c.version_id == target.version_id, evals.c.sha256 == wanted.sha256, evals.c.state == "done"
    )
    newest = query.order_by(evals.c.id.desc()).limit(1)
    score = connection.scalar(newest.where(evals.c.judge == wanted.judge).with_only_columns(evals.c.score_ppm))
    version = f"version {target.number}"
    other = connection.execute(newest).first() if score is None else None
    if other is not None:
        judges = f"with the judge {other.judge or 'none'}, and the alias demands {wanted.judge or 'none'}"
        raise EvalNotPassed(f"{version} has an eval of {wanted.name} {judges}")
    if score is None:
        raise EvalNotPassed(f"{version} has no finished eval of {wanted.name}, which the alias demands: run it first")
    if score < wanted.min_ppm:
        scores = f"{score / PPM:.3f} in {wanted.name}, and the alias demands {wanted.min_ppm / PPM:.3f}"
        raise EvalNotPassed(f"{version} has a score of {scores}")


def delete_evals(connection: Connection, version_ids: Sequence[str]) -> None:
    """Delete all evals in which one of these versions answers."""
    _delete(connection, or_(evals.c.version_id.in_(version_ids), evals.c.compared_id.in_(version_ids)))


def _delete_older(connection: Connection, version_id: str) -> None:
    is_finished = and_(evals.c.version_id == version_id, evals.c.state.not_in(UNFINISHED))
    query = select(evals.c.id).where(is_finished).order_by(evals.c.id.desc())
    older = connection.scalars(query.offset(MAX_KEPT_EVALS - 1).limit(100)).all()
    if older:
        _delete(connection, evals.c.id.in_(older))


def _delete(connection: Connection, which: Any) -> None:
    ids = select(evals.c.id).where(which)
    connection.execute(delete(eval_answers).where(eval_answers.c.eval_id.in_(ids)))
    connection.execute(delete(evals).where(which))


def _end(connection: Connection, which: Any, state: EvalState, now_us: int) -> bool:
    is_open = evals.c.state.in_(UNFINISHED)
    return connection.execute(update(evals).where(which, is_open).values(ended(state, now_us))).rowcount > 0


def ended(state: EvalState, now_us: int) -> dict[str, Any]:
    # The file is no longer needed. The answers stay.
    return {"state": state, "finished_us": now_us, "content": b"", **NO_CLAIM}


def _ready_version(connection: Connection, adapter_id: str, number: int) -> str:
    versions = adapter_versions.c
    query = select(versions.id, versions.state).where(
        versions.adapter_id == adapter_id, versions.number == (number if 0 < number <= MAX_VERSION else 0)
    )
    found = connection.execute(query).first()
    if found is None:
        raise VersionNotFound("the adapter has no such version")
    if found.state != "ready":
        raise VersionNotReady(f"version {number} is {found.state}: only a ready version can be evaluated")
    return str(found.id)


def _select() -> Any:
    compared = adapter_versions.alias("compared")
    columns = evals.c
    return (
        select(
            columns.id,
            columns.tenant_id,
            tenants.c.slug,
            adapter_versions.c.adapter_id,
            adapters.c.name.label("adapter_name"),
            adapter_versions.c.number,
            compared.c.number.label("compared"),
            columns.name,
            columns.sha256,
            columns.judge,
            columns.state,
            columns.num_cases,
            columns.num_answers,
            columns.score_ppm,
            columns.num_passed,
            columns.compared_ppm,
            columns.compared_passed,
            columns.share_base_cache,
            columns.divergence_ppm,
            columns.num_measured,
            columns.api_key_id,
            columns.created_by,
            columns.error_code,
            columns.error,
            columns.created_us,
            columns.finished_us,
        )
        .join_from(evals, adapter_versions, adapter_versions.c.id == columns.version_id)
        .join(adapters, adapters.c.id == adapter_versions.c.adapter_id)
        .join(tenants, tenants.c.id == adapters.c.tenant_id)
        .outerjoin(compared, compared.c.id == columns.compared_id)
    )


def require_eval(connection: Connection, eval_id: str) -> Eval:
    row = None
    if is_identifier(eval_id):
        row = connection.execute(_select().where(evals.c.id == eval_id)).first()
    if row is None:
        raise EvalNotFound("there is no such eval")
    return _eval(row)


def _eval(row: Row[Any]) -> Eval:
    facts = dict(row._mapping)
    facts["tenant_slug"], facts["version"] = facts.pop("slug"), facts.pop("number")
    return Eval(**facts)


def _answer(row: Row[Any]) -> EvalAnswer:
    graded = row.score_ppm, bool(row.is_passed), row.answer, row.detail
    return EvalAnswer(row.line, row.side, *graded, row.divergence_ppm)
