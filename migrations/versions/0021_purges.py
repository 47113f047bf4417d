"""Add purges and the version numbers of purged adapters. Servers that use the previous schema ignore both: they neither
delete blobs again nor continue the numbers. Purge nothing before all servers have been upgraded.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "retired_numbers",
        sa.Column("model", sa.String(length=127), nullable=False),
        sa.Column("last_number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_retired_numbers")),
    )
    op.create_table(
        "purges",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("purged_us", sa.BigInteger(), nullable=False),
        sa.Column("due_us", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("kind IN ('digest', 'version')", name=op.f("ck_purges_kind")),
        sa.CheckConstraint("state IN ('deleting', 'deleted')", name=op.f("ck_purges_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_purges")),
    )


def downgrade() -> None:
    op.drop_table("purges")
    op.drop_table("retired_numbers")
