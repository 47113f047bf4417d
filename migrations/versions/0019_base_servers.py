"""Add the servers of each base. Servers that use the previous schema ignore the table, so it does not list them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "base_servers",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("base_id", sa.String(length=64), nullable=False),
        sa.Column("address", sa.String(length=300), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("seen_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('serving', 'draining')", name=op.f("ck_base_servers_state")),
        sa.ForeignKeyConstraint(["base_id"], ["bases.id"], name=op.f("fk_base_servers_base_id_bases")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_base_servers")),
    )


def downgrade() -> None:
    op.drop_table("base_servers")
