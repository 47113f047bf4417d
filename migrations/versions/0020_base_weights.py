"""Add weights by which requests are divided between bases. Servers that use the previous schema ignore them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("bases", sa.Column("prompt_sha256", sa.String(length=64), nullable=True))
    op.add_column("bases", sa.Column("weight", sa.Integer(), nullable=True))
    op.add_column("replicas", sa.Column("base_id", sa.String(length=64), nullable=True))


def downgrade() -> None:
    op.drop_column("replicas", "base_id")
    op.drop_column("bases", "weight")
    op.drop_column("bases", "prompt_sha256")
