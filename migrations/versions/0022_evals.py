"""Add evals and their answers, and what an alias demands of its versions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"

_ID, _SHA256 = sa.String(40), sa.String(64)
_INTEGER, _BIG = sa.Integer(), sa.BigInteger()


def upgrade() -> None:
    op.create_table(
        "evals",
        sa.Column("id", _ID, nullable=False),
        sa.Column("version_id", _ID, nullable=False),
        sa.Column("compared_id", _ID, nullable=True),
        sa.Column("tenant_id", _ID, nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("sha256", _SHA256, nullable=False),
        sa.Column("judge", sa.String(256), nullable=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("num_cases", _INTEGER, nullable=False),
        sa.Column("num_answers", _INTEGER, nullable=False),
        sa.Column("score_ppm", _INTEGER, nullable=True),
        sa.Column("num_passed", _INTEGER, nullable=True),
        sa.Column("compared_ppm", _INTEGER, nullable=True),
        sa.Column("compared_passed", _INTEGER, nullable=True),
        sa.Column("api_key_id", _ID, nullable=True),
        sa.Column("created_by", _ID, nullable=False),
        sa.Column("error_code", sa.String(64), nullable=True),
        sa.Column("error", sa.String(500), nullable=True),
        sa.Column("claimed_by", _ID, nullable=True),
        sa.Column("claim_expires_us", _BIG, nullable=True),
        sa.Column("created_us", _BIG, nullable=False),
        sa.Column("finished_us", _BIG, nullable=True),
        sa.ForeignKeyConstraint(["version_id"], ["adapter_versions.id"]),
        sa.ForeignKeyConstraint(["compared_id"], ["adapter_versions.id"]),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("state IN ('queued', 'running', 'done', 'failed', 'cancelled')", name="state"),
    )
    op.create_index("ix_evals_version_id_id", "evals", ["version_id", "id"])
    op.create_index("ix_evals_compared_id", "evals", ["compared_id"])
    unfinished = sa.text("state IN ('queued', 'running')")
    op.create_index("ix_evals_state_id", "evals", ["state", "id"], postgresql_where=unfinished)
    op.create_table(
        "eval_answers",
        sa.Column("eval_id", _ID, nullable=False),
        sa.Column("line", _INTEGER, nullable=False),
        sa.Column("side", sa.SmallInteger(), nullable=False),
        sa.Column("score_ppm", _INTEGER, nullable=False),
        sa.Column("is_passed", sa.SmallInteger(), nullable=False),
        sa.Column("answer", sa.String(1000), nullable=False),
        sa.Column("detail", sa.String(300), nullable=False),
        sa.ForeignKeyConstraint(["eval_id"], ["evals.id"]),
        sa.PrimaryKeyConstraint("eval_id", "line", "side"),
    )
    op.add_column("adapter_aliases", sa.Column("required_eval", sa.JSON(), nullable=True))
    op.add_column("adapter_aliases", sa.Column("canary", sa.JSON(), nullable=True))
    watched = sa.text("canary IS NOT NULL")
    op.create_index(
        "ix_adapter_aliases_canary", "adapter_aliases", ["updated_us"], postgresql_where=watched, sqlite_where=watched
    )
