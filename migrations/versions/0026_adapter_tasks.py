"""Add what a version was trained for, such as classes of texts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    op.add_column("adapter_versions", sa.Column("task", sa.JSON(), nullable=True))
