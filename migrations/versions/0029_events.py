"""Add events and webhooks, and remember which budgets have been announced."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"

_ID = sa.String(40)
_BIG = sa.BigInteger()


def upgrade() -> None:
    op.add_column("quota_counters", sa.Column("announced_us", _BIG, nullable=True))
    unannounced = sa.text("announced_us IS NULL")
    op.create_index(
        "ix_quota_counters_unannounced",
        "quota_counters",
        ["window_start_us"],
        postgresql_where=unannounced,
        sqlite_where=unannounced,
    )
    op.create_table(
        "events",
        sa.Column("id", _ID, nullable=False),
        sa.Column("type", sa.String(40), nullable=False),
        sa.Column("tenant_id", _ID, nullable=False),
        sa.Column("adapter_id", _ID, nullable=True),
        sa.Column("created_us", _BIG, nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("position", _BIG, nullable=True),
        sa.Column("sequence", _BIG, nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("position", name="uq_events_position"),
    )
    op.create_index("ix_events_tenant_id_sequence", "events", ["tenant_id", "sequence"])
    op.create_index("ix_events_created_us", "events", ["created_us"])
    unnumbered = sa.text("position IS NULL")
    op.create_index("ix_events_unnumbered", "events", ["id"], postgresql_where=unnumbered, sqlite_where=unnumbered)
    op.create_table(
        "event_heads",
        sa.Column("tenant_id", _ID, nullable=False),
        sa.Column("number", _BIG, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id"),
    )
    op.create_table(
        "webhooks",
        sa.Column("id", _ID, nullable=False),
        sa.Column("tenant_id", _ID, nullable=False),
        sa.Column("url", sa.String(2000), nullable=False),
        sa.Column("types", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_us", _BIG, nullable=False),
        sa.Column("sequence", _BIG, nullable=False),
        sa.Column("num_failures", sa.Integer(), nullable=False),
        sa.Column("due_us", _BIG, nullable=False),
        sa.Column("last_error", sa.String(200), nullable=True),
        sa.Column("delivered_us", _BIG, nullable=True),
        sa.Column("claimed_by", _ID, nullable=True),
        sa.Column("claim_expires_us", _BIG, nullable=True),
        sa.CheckConstraint("state IN ('active', 'disabled')", name="state"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_webhooks_tenant_id_id", "webhooks", ["tenant_id", "id"])
