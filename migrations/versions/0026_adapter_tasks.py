"""Add what a version was trained for, such as classes of texts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapter_versions", sa.Column("task", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Raise an error, because older versions of loramux cannot serve classifiers."""
    raise NotImplementedError("the schema cannot be downgraded")
