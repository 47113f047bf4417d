"""Add optional files to versions, and a digest that covers them. Running servers of older versions are unaffected."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """No row is rewritten: existing versions have no `version_digest`, so `digest` identifies them."""
    op.add_column("adapter_versions", sa.Column("version_digest", sa.String(length=64), nullable=True))
    op.create_table(
        "adapter_version_files",
        sa.Column("version_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version_id"], ["adapter_versions.id"], name=op.f("fk_adapter_version_files_version_id_adapter_versions")
        ),
        sa.PrimaryKeyConstraint("version_id", "name", name=op.f("pk_adapter_version_files")),
    )


def downgrade() -> None:
    """Delete the optional files. An older server serves their versions with the weights alone."""
    op.drop_table("adapter_version_files")
    # Alembic's batch mode would replace the table, which SQLite refuses because other tables refer to it.
    op.drop_column("adapter_versions", "version_digest")
