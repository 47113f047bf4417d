"""Add the servers that share requests, and the adapters that they hold. Older servers ignore both tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "replicas",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("address", sa.String(length=300), nullable=False),
        sa.Column("base", sa.String(length=64), nullable=False),
        sa.Column("version", sa.String(length=40), nullable=False),
        sa.Column("protocol", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("num_running", sa.Integer(), nullable=False),
        sa.Column("num_waiting", sa.Integer(), nullable=False),
        sa.Column("capacity", sa.Integer(), nullable=False),
        sa.Column("num_pages", sa.Integer(), nullable=False),
        sa.Column("num_free_pages", sa.Integer(), nullable=False),
        sa.Column("certificates", sa.String(length=8192), nullable=False),
        sa.CheckConstraint("state IN ('serving', 'draining')", name=op.f("ck_replicas_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replicas")),
    )
    op.create_table(
        "adapter_residency",
        sa.Column("replica_id", sa.String(length=40), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("summary", sa.LargeBinary(length=32768), nullable=False),
        sa.CheckConstraint("length(summary) <= 32768", name=op.f("ck_adapter_residency_summary")),
        sa.ForeignKeyConstraint(["replica_id"], ["replicas.id"], name=op.f("fk_adapter_residency_replica_id_replicas")),
        sa.PrimaryKeyConstraint("replica_id", name=op.f("pk_adapter_residency")),
    )


def downgrade() -> None:
    op.drop_table("adapter_residency")
    op.drop_table("replicas")
