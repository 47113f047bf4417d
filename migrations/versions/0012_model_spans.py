"""Add sums by model over hours, and over 2, 4, 8 and 16 days instead of weeks."""

from __future__ import annotations

from collections.abc import Iterable

from alembic import op

from loramux.migrations.model_spans import back_to_weeks, sum_up_models

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Compute the new sums from the existing ones. This takes a few minutes for ten million requests."""
    _run(sum_up_models())


def downgrade() -> None:
    """Restore the weekly sums."""
    _run(back_to_weeks())


def _run(statements: Iterable[str]) -> None:
    if op.get_bind().dialect.name == "postgresql":
        # Gateways that add usage to the rollups wait for this lock. A gateway of an older version that is still running
        # afterwards would not update the new sums.
        op.execute("LOCK TABLE usage_rollups IN SHARE ROW EXCLUSIVE MODE")
    for statement in statements:
        op.execute(statement)
