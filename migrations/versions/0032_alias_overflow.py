"""Let aliases name a model that answers when they cannot."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"


def upgrade() -> None:
    op.add_column("adapter_aliases", sa.Column("overflow", sa.String(200), nullable=True))
    is_set = sa.text("overflow IS NOT NULL")
    op.create_index(
        "ix_adapter_aliases_overflow",
        "adapter_aliases",
        ["adapter_id"],
        postgresql_where=is_set,
        sqlite_where=is_set,
    )
