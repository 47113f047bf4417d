from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from loramux.adapter_store.errors import BaseNotFound, BasesDiffer, InvalidBaseWeights
from loramux.adapter_store.registry.base_shares import MAX_BASE_WEIGHT, BaseShare, read_shares
from loramux.adapter_store.registry.bases import Bases
from loramux.migrations.database import Database
from loramux.migrations.schema import audit_log
from tests.migrated import migrated_sqlite

OLD, NEW, THIRD = "a" * 64, "b" * 64, "c" * 64
PROMPTS = "f" * 64


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Database]:
    database = Database(migrated_sqlite(tmp_path / "loramux.db"))
    yield database
    database.close()


def three_bases(database: Database) -> Bases:
    bases = Bases(database)
    for base_id in (OLD, NEW, THIRD):
        bases.register(base_id, "llama", PROMPTS)
    return bases


def weights(database: Database) -> dict[str, int]:
    with database.read() as connection:
        return {share.base_id: share.weight for share in read_shares(connection)}


def test_weights_are_replaced_and_audited(database: Database) -> None:
    bases = three_bases(database)
    for given in ({OLD: 90, NEW: 10}, {OLD: 90, NEW: 10}, {NEW: 1, THIRD: 0}, {}, {}):
        bases.set_weights(given)
        assert weights(database) == given
        assert {base.id: base.weight for base in bases.list() if base.weight is not None} == given
    bases.set_weights({OLD: 1, NEW: 1})
    with database.read() as connection:
        assert BaseShare(base_id=OLD, weight=1, prompt_sha256=PROMPTS) in read_shares(connection)
        rows = connection.execute(select(audit_log.c.action, audit_log.c.changes).order_by(audit_log.c.id)).all()
    # Calls that change nothing are not recorded.
    assert [row.action for row in rows] == ["base.weight"] * 4
    assert rows[1].changes == {OLD: [90, None], NEW: [10, 1], THIRD: [None, 0]}


def test_server_that_starts_again_keeps_the_weight(sqlite: Database) -> None:
    bases = three_bases(sqlite)
    bases.set_weights({OLD: 90, NEW: 10})
    bases.register(NEW, "llama", PROMPTS)
    assert weights(sqlite) == {OLD: 90, NEW: 10}


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({OLD: 1}, InvalidBaseWeights, "at least two bases"),
        ({OLD: 0, NEW: 0}, InvalidBaseWeights, "above 0"),
        ({OLD: -1, NEW: 2}, InvalidBaseWeights, "between 0 and"),
        ({OLD: 1, NEW: MAX_BASE_WEIGHT + 1}, InvalidBaseWeights, "between 0 and"),
        ({OLD: 1, "d" * 64: 1}, BaseNotFound, "no base"),
    ],
    ids=["one base", "only zeros", "negative", "too large", "unknown"],
)
def test_weights_that_divide_nothing_are_refused(
    sqlite: Database, given: dict[str, int], error: type[Exception], says: str
) -> None:
    bases = three_bases(sqlite)
    bases.set_weights({OLD: 90, NEW: 10})
    with pytest.raises(error, match=says):
        bases.set_weights(given)
    assert weights(sqlite) == {OLD: 90, NEW: 10}


@pytest.mark.parametrize(
    ("served_name", "prompts", "says"),
    [
        ("llama", "e" * 64, "different tokenizers or chat templates.*load balancer"),
        ("llama", None, "is not known yet"),
        ("llama-2", PROMPTS, "different served names"),
    ],
    ids=["another tokenizer", "unknown tokenizer", "another name"],
)
def test_requests_are_not_divided_between_unlike_bases(
    sqlite: Database, served_name: str, prompts: str | None, says: str
) -> None:
    bases = three_bases(sqlite)
    bases.register(NEW, served_name, prompts)
    with pytest.raises(BasesDiffer, match=says):
        bases.set_weights({OLD: 90, NEW: 10})
    assert weights(sqlite) == {}
    bases.set_weights({OLD: 90, THIRD: 10})
