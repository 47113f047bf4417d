"""Remember deleted tenants until every server has deleted the K and V of their prompts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "prefix_purges",
        sa.Column("isolation_key", sa.LargeBinary(32), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("isolation_key"),
    )
    op.create_index("ix_prefix_purges_expires_us", "prefix_purges", ["expires_us"])


def downgrade() -> None:
    """Raise an error, because older versions of loramux would keep what deleted tenants have cached."""
    raise NotImplementedError("the schema cannot be downgraded")
