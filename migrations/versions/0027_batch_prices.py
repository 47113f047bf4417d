"""Add the price of batches, in percent of the price of other requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    op.add_column("prices", sa.Column("batch_percent", sa.Integer(), nullable=False, server_default="100"))
