"""Add console sessions and login failures, shared by all servers on the database."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "console_sessions",
        sa.Column("id_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id_sha256", name=op.f("pk_console_sessions")),
    )
    op.create_index("ix_console_sessions_key_created", "console_sessions", ["key_id", "created_us"])
    op.create_index("ix_console_sessions_expires", "console_sessions", ["expires_us"])
    op.create_table(
        "login_failures",
        sa.Column("origin", sa.String(length=64), nullable=False),
        sa.Column("forgiven_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("origin", name=op.f("pk_login_failures")),
    )
    op.create_index("ix_login_failures_forgiven", "login_failures", ["forgiven_us"])


def downgrade() -> None:
    op.drop_table("login_failures")
    op.drop_table("console_sessions")
