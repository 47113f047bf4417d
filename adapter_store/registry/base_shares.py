"""The weights by which requests are divided between bases, such as an old and a new version of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select, update

from loramux.adapter_store.errors import BaseNotFound, BasesDiffer, InvalidBaseWeights
from loramux.adapter_store.registry.base_servers import lock_bases
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.schema import bases

MAX_BASE_WEIGHT = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseShare:
    base_id: str
    weight: int
    prompt_sha256: str | None
    """Equal for bases with the same tokenizer and chat templates."""


def read_shares(connection: Connection) -> Sequence[BaseShare]:
    """Return all bases that have a weight."""
    columns = bases.c
    query = select(columns.id, columns.weight, columns.prompt_sha256).where(columns.weight.is_not(None))
    return [
        BaseShare(base_id=row.id, weight=row.weight, prompt_sha256=row.prompt_sha256)
        for row in connection.execute(query)
    ]


def set_shares(database: Database, weights: Mapping[str, int]) -> None:
    """Divide requests between the bases in `weights`, or stop dividing them if `weights` is empty. Blocking.

    Raises InvalidBaseWeights, BaseNotFound, or BasesDiffer if the bases differ in their tokenizers, chat templates or
    served names, or if a base's tokenizer is not known yet.
    """
    _check(weights)
    with database.write() as connection:
        lock_bases(database, connection)
        rows = {row.id: row for row in connection.execute(select(bases))}
        unknown = next((base_id for base_id in weights if base_id not in rows), None)
        if unknown is not None:
            raise BaseNotFound(f"there is no base {unknown!r}")
        _check_alike([rows[base_id] for base_id in weights])
        before = {base_id: row.weight for base_id, row in rows.items() if row.weight is not None}
        if before == weights:
            return
        for base_id in before.keys() | weights.keys():
            connection.execute(update(bases).where(bases.c.id == base_id).values(weight=weights.get(base_id)))
        now_us = database.now_us(connection)
        audit(connection, now_us, "base.weight", "bases", tenant_id=None, before=before, after=weights)


def _check(weights: Mapping[str, int]) -> None:
    if not all(0 <= weight <= MAX_BASE_WEIGHT for weight in weights.values()):
        raise InvalidBaseWeights("invalid_weight", f"a weight must be between 0 and {MAX_BASE_WEIGHT}", "weights")
    if len(weights) == 1:
        raise InvalidBaseWeights("invalid_weights", "give weights to at least two bases, or to none", "weights")
    if weights and not any(weights.values()):
        raise InvalidBaseWeights("invalid_weights", "at least one weight must be above 0", "weights")


def _check_alike(rows: Sequence[Row[Any]]) -> None:
    unknown = next((row for row in rows if row.prompt_sha256 is None), None)
    if unknown is not None:
        raise BasesDiffer(
            f"the tokenizer of base {unknown.id[:16]} is not known yet: start a server of this base with this release"
        )
    if len({row.prompt_sha256 for row in rows}) > 1:
        raise BasesDiffer(
            "the bases have different tokenizers or chat templates, and servers forward token ids: divide the requests "
            "in the load balancer"
        )
    if len({row.served_name for row in rows}) > 1:
        raise BasesDiffer("the bases have different served names: start their servers with the same --served-name")
