"""Keep reservations only for running or correctable requests. Settled requests are only in the ledger."""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Copy the few rows that must stay, empty the table, and restore them. This is fast even with many settled
    reservations.
    """
    op.execute("CREATE TABLE kept_reservations AS SELECT * FROM reservations WHERE state <> 'settled'")
    # SQLite's DELETE without a condition is as fast as TRUNCATE.
    op.execute("TRUNCATE reservations" if op.get_bind().dialect.name == "postgresql" else "DELETE FROM reservations")
    op.execute("INSERT INTO reservations SELECT * FROM kept_reservations")
    op.execute("DROP TABLE kept_reservations")


def downgrade() -> None:
    """Do nothing. The columns are unchanged, and an older server does not need the deleted rows."""
