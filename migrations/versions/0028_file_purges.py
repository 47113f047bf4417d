"""Remember purged tenants until the contents of their files are deleted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"


def upgrade() -> None:
    op.create_table(
        "file_purges",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("purged_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id"),
    )
