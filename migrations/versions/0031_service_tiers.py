"""Add service tiers: to tenants, keys, running requests, the ledger, its sums and prices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"

_ID, _MODEL, _TIER = sa.String(40), sa.String(200), sa.String(16)
_SERIES = (
    ("tenant_id", _ID),
    ("api_key_id", _ID),
    ("adapter_id", _ID),
    ("adapter_version_id", _ID),
    ("model", _MODEL),
    ("base", _MODEL),
    ("endpoint", _ID),
    ("end_user", sa.String(128)),
    ("status", _TIER),
)
_AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")


def upgrade() -> None:
    for table in ("tenants", "api_keys"):
        is_key = table == "api_keys"
        for name in ("max_service_tier", "default_service_tier"):
            default = None if is_key else "default"
            op.add_column(table, sa.Column(name, _TIER, nullable=is_key, server_default=default))
    for table in ("reservations", "usage_events"):
        op.add_column(table, sa.Column("service_tier", _TIER, nullable=False, server_default="default"))
    for name in ("flex_percent", "priority_percent"):
        op.add_column("prices", sa.Column(name, sa.Integer(), nullable=False, server_default="100"))
    if op.get_bind().dialect.name == "sqlite":
        _create_sums_again()
    else:
        op.add_column("usage_series", sa.Column("service_tier", _TIER, nullable=False, server_default=""))
        op.drop_constraint("uq_usage_series_tenant_id", "usage_series", type_="unique")
        op.create_unique_constraint(
            "uq_usage_series_tenant_id", "usage_series", [*(name for name, _ in _SERIES), "service_tier"]
        )
    # Only the finest sums keep both the key and the endpoint. They keep the tier, too.
    op.execute("UPDATE usage_series SET service_tier = 'default' WHERE api_key_id <> '' AND endpoint <> ''")


def _create_sums_again() -> None:
    """Copy the sums into new tables, because SQLite cannot change the columns of a unique constraint."""
    op.drop_index("ix_usage_rollups_tenant_span_start", "usage_rollups")
    # The old sums go on referring to the old series.
    op.execute("ALTER TABLE usage_rollups RENAME TO old_rollups")
    op.execute("ALTER TABLE usage_series RENAME TO old_series")
    columns = [sa.Column(name, kind, nullable=False) for name, kind in _SERIES]
    op.create_table(
        "usage_series",
        sa.Column("id", sa.Integer(), nullable=False),
        *columns,
        sa.Column("service_tier", _TIER, nullable=False, server_default=""),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint(*(name for name, _ in _SERIES), "service_tier"),
    )
    op.create_table(
        "usage_rollups",
        sa.Column("grain", sa.SmallInteger(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("span_us", "start_us")),
        sa.Column("tenant_id", _ID, nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("series_id", *_AMOUNTS)),
        sa.ForeignKeyConstraint(["series_id"], ["usage_series.id"]),
        sa.PrimaryKeyConstraint("grain", "span_us", "start_us", "tenant_id", "series_id"),
        sqlite_with_rowid=False,
    )
    series = ", ".join(("id", *(name for name, _ in _SERIES)))
    sums = ", ".join(("grain", "span_us", "start_us", "tenant_id", "series_id", *_AMOUNTS))
    op.execute(f"INSERT INTO usage_series ({series}) SELECT {series} FROM old_series")  # noqa: S608 - only constants
    op.execute(f"INSERT INTO usage_rollups ({sums}) SELECT {sums} FROM old_rollups")  # noqa: S608
    op.execute("DROP TABLE old_rollups")
    op.execute("DROP TABLE old_series")
    op.create_index(
        "ix_usage_rollups_tenant_span_start", "usage_rollups", ["tenant_id", "grain", "span_us", "start_us"]
    )
