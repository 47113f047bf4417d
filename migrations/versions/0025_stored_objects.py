"""Add stored chat completions, conversations, and responses in the background."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"

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
    op.add_column("responses", sa.Column("background_state", sa.String(16), nullable=True))
    op.add_column("responses", sa.Column("num_events", sa.Integer(), nullable=True))
    unfinished = sa.text("background_state IN ('queued', 'in_progress', 'cancelling')")
    op.create_index(
        "ix_responses_unfinished", "responses", ["tenant_id"], postgresql_where=unfinished, sqlite_where=unfinished
    )
    op.create_table(
        "response_events",
        sa.Column("response_id", _ID, nullable=False),
        sa.Column("end_sequence", sa.Integer(), nullable=False),
        sa.Column("first_sequence", sa.Integer(), nullable=False),
        sa.Column("expires_us", _BIG, nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["response_id"], ["responses.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("response_id", "end_sequence"),
    )
    op.create_index("ix_response_events_expires_us", "response_events", ["expires_us"])
    op.create_table(
        "conversations",
        sa.Column("id", _ID, nullable=False),
        sa.Column("tenant_id", _ID, nullable=False),
        sa.Column("adapter_ids", sa.JSON(), nullable=False),
        sa.Column("num_items", sa.Integer(), nullable=False),
        sa.Column("num_bytes", _BIG, nullable=False),
        sa.Column("next_position", sa.Integer(), nullable=False),
        sa.Column("created_us", _BIG, nullable=False),
        sa.Column("expires_us", _BIG, nullable=False),
        sa.Column("metadata", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_conversations_tenant_id", "conversations", ["tenant_id"])
    op.create_index("ix_conversations_expires_us", "conversations", ["expires_us"])
    op.create_table(
        "conversation_items",
        sa.Column("conversation_id", _ID, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("item_key", sa.String(32), nullable=False),
        sa.Column("num_bytes", sa.Integer(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["conversation_id"], ["conversations.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("conversation_id", "position"),
        sa.UniqueConstraint("conversation_id", "item_key"),
    )
