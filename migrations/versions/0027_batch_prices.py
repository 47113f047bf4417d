"""Add the price of batches, in percent of the price of other requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("prices", sa.Column("batch_percent", sa.Integer(), nullable=False, server_default="100"))


def downgrade() -> None:
    """Raise an error, because older versions of loramux would charge the full price for batches."""
    raise NotImplementedError("the schema cannot be downgraded")
