"""Remember deleted tenants until every server has deleted the K and V of their prompts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"


def upgrade() -> None:
    op.create_table(
        "prefix_purges",
        sa.Column("isolation_key", sa.LargeBinary(32), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("isolation_key"),
    )
    op.create_index("ix_prefix_purges_expires_us", "prefix_purges", ["expires_us"])
