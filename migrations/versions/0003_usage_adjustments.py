"""Add charge corrections for requests that were recovered and settled later."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage_adjustments",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("request_id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"], ["usage_events.request_id"], name=op.f("fk_usage_adjustments_request_id_usage_events")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_usage_adjustments_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_adjustments")),
        sa.UniqueConstraint("request_id", name=op.f("uq_usage_adjustments_request_id")),
    )
    op.create_index("ix_usage_adjustments_tenant_created", "usage_adjustments", ["tenant_id", "created_us"])


def downgrade() -> None:
    op.drop_table("usage_adjustments")
