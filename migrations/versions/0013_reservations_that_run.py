"""Reservations are of requests that run, or may still be corrected; what was settled is in the ledger alone."""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Writes the few that stay anew, since to empty the table takes no time, however many were settled."""
    op.execute("CREATE TABLE kept_reservations AS SELECT * FROM reservations WHERE state <> 'settled'")
    # SQLite empties a table as fast where nothing is asked of its rows.
    op.execute("TRUNCATE reservations" if op.get_bind().dialect.name == "postgresql" else "DELETE FROM reservations")
    op.execute("INSERT INTO reservations SELECT * FROM kept_reservations")
    op.execute("DROP TABLE kept_reservations")


def downgrade() -> None:
    """Nothing: a server of before leaves what it settles, and finds fewer rows of what others did."""
