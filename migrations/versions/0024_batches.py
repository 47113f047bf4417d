"""Add the files of tenants, and batches of requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"

_ID = sa.String(40)
_INTEGER, _BIG = sa.Integer(), sa.BigInteger()


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", _ID, nullable=False),
        sa.Column("tenant_id", _ID, nullable=False),
        sa.Column("api_key_id", _ID, nullable=False),
        sa.Column("purpose", sa.String(20), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("num_bytes", _BIG, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_us", _BIG, nullable=False),
        sa.Column("expires_us", _BIG, nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("state IN ('uploading', 'ready', 'deleting')", name="state"),
        sa.CheckConstraint("purpose IN ('batch', 'batch_output')", name="purpose"),
    )
    op.create_index("ix_files_tenant_id_id", "files", ["tenant_id", "id"])
    op.create_index(
        "ix_files_state_created", "files", ["state", "created_us"], postgresql_where=sa.text("state != 'ready'")
    )
    kept = sa.text("expires_us IS NOT NULL")
    op.create_index("ix_files_expires", "files", ["expires_us"], postgresql_where=kept, sqlite_where=kept)
    op.create_table(
        "batches",
        sa.Column("id", _ID, nullable=False),
        sa.Column("tenant_id", _ID, nullable=False),
        sa.Column("api_key_id", _ID, nullable=False),
        sa.Column("endpoint", sa.String(40), nullable=False),
        sa.Column("input_file_id", _ID, nullable=False),
        sa.Column("output_file_id", _ID, nullable=True),
        sa.Column("error_file_id", _ID, nullable=True),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("errors", sa.JSON(), nullable=False),
        sa.Column("num_lines", _INTEGER, nullable=False),
        sa.Column("num_completed", _INTEGER, nullable=False),
        sa.Column("num_failed", _INTEGER, nullable=False),
        sa.Column("claimed_by", _ID, nullable=True),
        sa.Column("claim_expires_us", _BIG, nullable=True),
        sa.Column("created_us", _BIG, nullable=False),
        sa.Column("expires_us", _BIG, nullable=False),
        sa.Column("in_progress_us", _BIG, nullable=True),
        sa.Column("finalizing_us", _BIG, nullable=True),
        sa.Column("cancelling_us", _BIG, nullable=True),
        sa.Column("finished_us", _BIG, nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint(
            "state IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'completed', 'failed', 'expired', "
            "'cancelled')",
            name="state",
        ),
    )
    op.create_index("ix_batches_tenant_id_id", "batches", ["tenant_id", "id"])
    unfinished = sa.text("state IN ('validating', 'in_progress', 'finalizing', 'cancelling')")
    op.create_index("ix_batches_state_id", "batches", ["state", "id"], postgresql_where=unfinished)
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", _ID, nullable=False),
        sa.Column("line", _INTEGER, nullable=False),
        sa.Column("start", _BIG, nullable=False),
        sa.Column("num_bytes", _INTEGER, nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("request_id", _ID, nullable=True),
        sa.Column("status", sa.SmallInteger(), nullable=True),
        sa.Column("answer", sa.LargeBinary(), nullable=True),
        sa.Column("usage", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"]),
        sa.PrimaryKeyConstraint("batch_id", "line"),
    )
    op.create_index("ix_batch_lines_waiting", "batch_lines", ["batch_id", "status", "model", "line"])
