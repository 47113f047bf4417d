"""Let aliases share the base's K and V, and evals measure what that changes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    op.add_column("adapter_aliases", sa.Column("share_base_cache", sa.Integer(), nullable=True))
    op.add_column("adapter_alias_history", sa.Column("share_base_cache", sa.Integer(), nullable=True))
    op.add_column("evals", sa.Column("share_base_cache", sa.Integer(), nullable=True))
    op.add_column("evals", sa.Column("divergence_ppm", sa.BigInteger(), nullable=True))
    op.add_column("evals", sa.Column("num_measured", sa.Integer(), nullable=True))
    op.add_column("eval_answers", sa.Column("divergence_ppm", sa.BigInteger(), nullable=True))
