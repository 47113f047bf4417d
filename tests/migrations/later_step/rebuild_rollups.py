"""Add a column, and rebuild all rollups of a ledger from which nothing was erased."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from alembic.script import ScriptDirectory

from loramux.migrations import schema
from tests.platform.ledger.rebuilt_rollups import rebuild_all_rollups

revision = "later"
down_revision = ScriptDirectory(str(Path(schema.__file__).parent)).get_current_head()
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        # Gateways that are still running wait for this lock, so that their usage is not counted twice.
        op.execute("LOCK TABLE usage_events, usage_adjustments, usage_batches IN SHARE ROW EXCLUSIVE MODE")
    op.add_column("tenants", sa.Column("later", sa.Integer(), nullable=True))
    for statement in rebuild_all_rollups():
        op.execute(statement)


def downgrade() -> None:
    raise NotImplementedError
