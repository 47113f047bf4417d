"""Add rollup grains by tenant, key, model and end user, in addition to the finest grain."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from loramux.migrations.ledger_rollups import roll_up_ledger

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")
_BEFORE = ("tenant_id", "api_key_id", "adapter_id", "adapter_version_id", "model", "base", "endpoint", "status")
_FINEST_NUMBER, _EVERYBODY_NUMBER = 5, 0


def upgrade() -> None:
    """Rebuild all rollups from the ledger. This takes minutes for millions of requests."""
    if op.get_bind().dialect.name == "postgresql":
        # A gateway that is still running waits for this lock and then fails, so that its usage is not counted twice.
        op.execute("LOCK TABLE usage_events, usage_adjustments, usage_batches IN SHARE ROW EXCLUSIVE MODE")
    op.drop_table("usage_rollups")
    op.drop_table("usage_series")
    _create_series((*_BEFORE[:-1], "end_user", "status"))
    _create_rollups(sa.Column("grain", sa.SmallInteger(), nullable=False))
    for statement in roll_up_ledger():
        op.execute(statement)


def downgrade() -> None:
    """Restore the older schema with the hourly and daily rows of its two grains."""
    op.execute(
        "CREATE TABLE kept_rollups AS SELECT span_us, start_us, tenant_id, series_id,"  # noqa: S608 - constants
        f" {', '.join(_AMOUNTS)} FROM usage_rollups WHERE grain IN ({_EVERYBODY_NUMBER}, {_FINEST_NUMBER})"
        " AND span_us IN (3600000000, 86400000000)"
    )
    op.execute(
        f"CREATE TABLE kept_series AS SELECT id, {', '.join(_BEFORE)} FROM usage_series"  # noqa: S608
        " WHERE id IN (SELECT series_id FROM kept_rollups)"
    )
    op.drop_table("usage_rollups")
    op.drop_table("usage_series")
    _create_series(_BEFORE)
    _create_rollups()
    op.execute(f"INSERT INTO usage_series (id, {', '.join(_BEFORE)}) SELECT * FROM kept_series")  # noqa: S608
    op.execute("INSERT INTO usage_rollups SELECT * FROM kept_rollups")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SELECT setval(pg_get_serial_sequence('usage_series', 'id'), (SELECT max(id) FROM usage_series))")
    op.drop_table("kept_rollups")
    op.drop_table("kept_series")


def _create_series(names: Sequence[str]) -> None:
    lengths = {"model": 200, "base": 200, "end_user": 128, "status": 16}
    op.create_table(
        "usage_series",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        *(sa.Column(name, sa.String(length=lengths.get(name, 40)), nullable=False) for name in names),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_series")),
        sa.UniqueConstraint(*names, name=op.f("uq_usage_series_tenant_id")),
    )


def _create_rollups(*grain: sa.Column[int]) -> None:
    first = [column.name for column in grain]
    op.create_table(
        "usage_rollups",
        *grain,
        sa.Column("span_us", sa.BigInteger(), nullable=False),
        sa.Column("start_us", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("series_id", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _AMOUNTS),
        sa.ForeignKeyConstraint(
            ["series_id"], ["usage_series.id"], name=op.f("fk_usage_rollups_series_id_usage_series")
        ),
        sa.PrimaryKeyConstraint(*first, "span_us", "start_us", "tenant_id", "series_id", name=op.f("pk_usage_rollups")),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_usage_rollups_tenant_span_start", "usage_rollups", ["tenant_id", *first, "span_us", "start_us"])
