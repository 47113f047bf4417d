"""Add idempotency keys, request cancellation, adapter limits for API keys, key rotation, and persistent pins."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("api_keys") as batch:
        batch.add_column(sa.Column("adapter_ids", sa.JSON(none_as_null=True), nullable=True))
        batch.add_column(sa.Column("previous_sha256", sa.LargeBinary(length=32), nullable=True))
        batch.add_column(sa.Column("previous_until_us", sa.BigInteger(), nullable=True))
    with op.batch_alter_table("reservations") as batch:
        batch.add_column(sa.Column("cancel_requested_us", sa.BigInteger(), nullable=True))
    with op.batch_alter_table("adapter_versions") as batch:
        batch.add_column(sa.Column("pinned_us", sa.BigInteger(), nullable=True))
    is_pinned = sa.text("pinned_us IS NOT NULL")
    op.create_index(
        "ix_adapter_versions_pinned",
        "adapter_versions",
        ["pinned_us"],
        postgresql_where=is_pinned,
        sqlite_where=is_pinned,
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("principal", sa.String(length=200), nullable=False),
        sa.Column("key_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("request_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("headers", sa.JSON(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("principal", "key_sha256", name=op.f("pk_idempotency_keys")),
    )
    op.create_index("ix_idempotency_keys_expires", "idempotency_keys", ["expires_us"])


def downgrade() -> None:
    op.drop_table("idempotency_keys")
    op.drop_index("ix_adapter_versions_pinned", table_name="adapter_versions")
    with op.batch_alter_table("adapter_versions") as batch:
        batch.drop_column("pinned_us")
    with op.batch_alter_table("reservations") as batch:
        batch.drop_column("cancel_requested_us")
    with op.batch_alter_table("api_keys") as batch:
        batch.drop_column("previous_until_us")
        batch.drop_column("previous_sha256")
        batch.drop_column("adapter_ids")
