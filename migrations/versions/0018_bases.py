"""Add the bases that versions are validated for. Servers that use the previous schema serve a version even if it
was validated only for another base.

Existing versions that were accepted count as validated for the first base that registers: see
`adapter_store/registry/bases.py`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapter_versions", sa.Column("base_id", sa.String(length=64), nullable=True))
    op.create_table(
        "bases",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("served_name", sa.String(length=200), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bases")),
    )
    op.create_table(
        "version_bases",
        sa.Column("version_id", sa.String(length=40), nullable=False),
        sa.Column("base_id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("claimed_by", sa.String(length=40), nullable=True),
        sa.Column("claim_expires_us", sa.BigInteger(), nullable=True),
        sa.Column("code", sa.String(length=64), nullable=True),
        sa.Column("message", sa.String(length=1000), nullable=True),
        sa.Column("checked_us", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("state IN ('validating', 'ready', 'rejected')", name=op.f("ck_version_bases_state")),
        sa.ForeignKeyConstraint(["base_id"], ["bases.id"], name=op.f("fk_version_bases_base_id_bases")),
        sa.ForeignKeyConstraint(
            ["version_id"], ["adapter_versions.id"], name=op.f("fk_version_bases_version_id_adapter_versions")
        ),
        sa.PrimaryKeyConstraint("version_id", "base_id", name=op.f("pk_version_bases")),
    )
    op.create_index("ix_version_bases_base_id_state", "version_bases", ["base_id", "state", "version_id"])


def downgrade() -> None:
    op.drop_table("version_bases")
    op.drop_table("bases")
    op.drop_column("adapter_versions", "base_id")
