"""Add the tokens that activate a version. Older servers would apply such a version to the whole prompt."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_versions = sa.table(
    "adapter_versions",
    sa.column("id", sa.String),
    sa.column("state", sa.String),
    sa.column("report", sa.JSON),
    sa.column("invocation_tokens", sa.JSON),
)


def upgrade() -> None:
    """Add the column. If this step was undone before, restore the tokens from the validation reports."""
    op.add_column("adapter_versions", sa.Column("invocation_tokens", sa.JSON(), nullable=True))
    connection, columns = op.get_bind(), _versions.c
    has_tokens = sa.cast(columns.report, sa.Text).like('%"invocation_tokens"%')
    for version_id, report in connection.execute(sa.select(columns.id, columns.report).where(has_tokens)).all():
        values = {"invocation_tokens": report.get("invocation_tokens", sa.null())}
        connection.execute(_versions.update().where(columns.id == version_id).values(values))


def downgrade() -> None:
    """Archive the versions that tokens activate, because an older server would apply them to the whole prompt."""
    columns = _versions.c
    is_served = columns.invocation_tokens.is_not(None) & (columns.state == "ready")
    op.execute(_versions.update().where(is_served).values(state="archived"))
    op.drop_column("adapter_versions", "invocation_tokens")
