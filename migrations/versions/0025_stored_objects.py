"""Add stored chat completions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

_ID = sa.String(40)
_BIG = sa.BigInteger()


def upgrade() -> None:
    op.create_table(
        "chat_completions",
        sa.Column("id", sa.String(48), nullable=False),
        sa.Column("tenant_id", _ID, nullable=False),
        sa.Column("adapter_id", _ID, nullable=True),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("metadata_tags", sa.Text(), nullable=False),
        sa.Column("created_us", _BIG, nullable=False),
        sa.Column("expires_us", _BIG, nullable=False),
        sa.Column("completion", sa.LargeBinary(), nullable=False),
        sa.Column("messages", sa.LargeBinary(), nullable=False),
        sa.Column("num_bytes", _BIG, nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_chat_completions_tenant_id_id", "chat_completions", ["tenant_id", "id"])
    op.create_index("ix_chat_completions_expires_us", "chat_completions", ["expires_us"])


def downgrade() -> None:
    """Raise an error, because older versions of loramux cannot keep chat completions."""
    raise NotImplementedError("the schema cannot be downgraded")
