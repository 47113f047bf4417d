"""Add prices, request costs, hourly and daily usage rollups, end users, and the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_HOUR_US, _DAY_US = 3_600_000_000, 86_400_000_000

_FACTS = """
    SELECT finished_us AS at_us, tenant_id, api_key_id, coalesce(adapter_id, '') AS adapter_id,
           coalesce(adapter_version_id, '') AS adapter_version_id, model, endpoint, status,
           1 AS requests, prompt_tokens, cached_tokens, completion_tokens
    FROM usage_events
    UNION ALL
    SELECT a.created_us, e.tenant_id, e.api_key_id, coalesce(e.adapter_id, ''),
           coalesce(e.adapter_version_id, ''), e.model, e.endpoint, e.status,
           0, a.prompt_tokens, a.cached_tokens, a.completion_tokens
    FROM usage_adjustments a JOIN usage_events e ON e.request_id = a.request_id
"""
_OF_TENANT = "tenant_id, api_key_id, adapter_id, adapter_version_id, model, endpoint, status"
_OF_ALL = "'' AS tenant_id, '' AS api_key_id, '' AS adapter_id, '' AS adapter_version_id, '' AS model, endpoint, status"
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_SERIES = ("tenant_id", "api_key_id", "adapter_id", "adapter_version_id", "model", "endpoint", "status")


def upgrade() -> None:
    with op.batch_alter_table("reservations", recreate="never") as batch:
        batch.add_column(sa.Column("base", sa.String(length=200), nullable=False, server_default=""))
        batch.add_column(sa.Column("end_user", sa.String(length=128), nullable=True))
    with op.batch_alter_table("usage_events", recreate="never") as batch:
        batch.add_column(sa.Column("base", sa.String(length=200), nullable=False, server_default=""))
        batch.add_column(sa.Column("end_user", sa.String(length=128), nullable=True))
        batch.add_column(sa.Column("cost_nanos", sa.BigInteger(), nullable=False, server_default="0"))
        batch.add_column(sa.Column("price_id", sa.String(length=40), nullable=True))
        batch.add_column(sa.Column("batch_id", sa.BigInteger(), nullable=False, server_default="0"))
        batch.create_index("ix_usage_events_finished", ["finished_us"], unique=False)
    with op.batch_alter_table("usage_adjustments", recreate="never") as batch:
        batch.add_column(sa.Column("cost_nanos", sa.BigInteger(), nullable=False, server_default="0"))
        batch.add_column(sa.Column("batch_id", sa.BigInteger(), nullable=False, server_default="0"))
        batch.create_index("ix_usage_adjustments_created", ["created_us"], unique=False)
    _create_rollups()
    _create_prices()
    _create_audit_log()
    _roll_up()


def downgrade() -> None:
    for table in ("audit_log", "prices", "usage_rollups", "usage_series", "usage_batches"):
        op.drop_table(table)
    with op.batch_alter_table("usage_adjustments") as batch:
        batch.drop_index("ix_usage_adjustments_created")
        batch.drop_column("batch_id")
        batch.drop_column("cost_nanos")
    with op.batch_alter_table("usage_events") as batch:
        batch.drop_index("ix_usage_events_finished")
        for column in ("batch_id", "price_id", "cost_nanos", "end_user", "base"):
            batch.drop_column(column)
    with op.batch_alter_table("reservations") as batch:
        batch.drop_column("end_user")
        batch.drop_column("base")


def _create_rollups() -> None:
    op.create_table(
        "usage_batches",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_batches")),
    )
    op.create_table(
        "usage_series",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("api_key_id", sa.String(length=40), nullable=False),
        sa.Column("adapter_id", sa.String(length=40), nullable=False),
        sa.Column("adapter_version_id", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("base", sa.String(length=200), nullable=False),
        sa.Column("endpoint", sa.String(length=40), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_series")),
        sa.UniqueConstraint(
            "tenant_id",
            "api_key_id",
            "adapter_id",
            "adapter_version_id",
            "model",
            "base",
            "endpoint",
            "status",
            name=op.f("uq_usage_series_tenant_id"),
        ),
    )
    op.create_table(
        "usage_rollups",
        sa.Column("span_us", sa.BigInteger(), nullable=False),
        sa.Column("start_us", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("series_id", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_nanos", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["series_id"], ["usage_series.id"], name=op.f("fk_usage_rollups_series_id_usage_series")
        ),
        sa.PrimaryKeyConstraint("span_us", "start_us", "tenant_id", "series_id", name=op.f("pk_usage_rollups")),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_usage_rollups_tenant_span_start", "usage_rollups", ["tenant_id", "span_us", "start_us"])


def _create_prices() -> None:
    op.create_table(
        "prices",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=True),
        sa.Column("scope", sa.String(length=40), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("prompt_nanos", sa.BigInteger(), nullable=False),
        sa.Column("cached_nanos", sa.BigInteger(), nullable=False),
        sa.Column("completion_nanos", sa.BigInteger(), nullable=False),
        sa.Column("effective_us", sa.BigInteger(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "prompt_nanos >= 0 AND cached_nanos >= 0 AND completion_nanos >= 0 AND cached_nanos <= prompt_nanos",
            name=op.f("ck_prices_amounts"),
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_prices_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prices")),
    )
    op.create_index("ix_prices_tenant_id_id", "prices", ["tenant_id", "id"])


def _create_audit_log() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(length=40), nullable=False),
        sa.Column("address", sa.String(length=64), nullable=True),
        sa.Column("request_id", sa.String(length=40), nullable=True),
        sa.Column("action", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=True),
        sa.Column("target", sa.String(length=200), nullable=False),
        sa.Column("changes", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_index("ix_audit_log_tenant_id_id", "audit_log", ["tenant_id", "id"])
    op.create_index("ix_audit_log_target_id", "audit_log", ["target", "id"])


def _roll_up() -> None:
    """Add the existing ledger to the rollups. No other transaction writes to the ledger during an upgrade."""
    for of in (_OF_TENANT, _OF_ALL):
        facts = f"(SELECT at_us, {of}, {', '.join(_SUMS)} FROM ({_FACTS}) AS facts) AS f"  # noqa: S608 - constants
        series = ", ".join(f"f.{name}" for name in _SERIES)
        op.execute(
            f"INSERT INTO usage_series ({', '.join(_SERIES)}, base) SELECT DISTINCT {series}, '' FROM {facts}"  # noqa: S608
        )
        same = " AND ".join(f"s.{name} = f.{name}" for name in _SERIES)
        sums = ", ".join(f"sum(f.{name})" for name in _SUMS)
        for span_us in (_HOUR_US, _DAY_US):
            start = f"f.at_us - f.at_us % {span_us}"
            op.execute(
                f"INSERT INTO usage_rollups (span_us, start_us, tenant_id, series_id, {', '.join(_SUMS)}, cost_nanos)"  # noqa: S608
                f" SELECT {span_us}, {start}, s.tenant_id, s.id, {sums}, 0"
                f" FROM {facts} JOIN usage_series s ON {same} GROUP BY {start}, s.tenant_id, s.id"
            )
