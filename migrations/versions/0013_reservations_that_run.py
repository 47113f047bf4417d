"""Reservations are of requests that run, or may still be corrected; what was settled is in the ledger alone."""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        # To write the few that stay takes no time, and gives the place of the others back.
        op.execute("CREATE TEMPORARY TABLE kept ON COMMIT DROP AS SELECT * FROM reservations WHERE state <> 'settled'")
        op.execute("TRUNCATE reservations")
        op.execute("INSERT INTO reservations SELECT * FROM kept")
    else:
        op.execute("DELETE FROM reservations WHERE state = 'settled'")


def downgrade() -> None:
    """Nothing: a server of before leaves what it settles, and does not miss what others did."""
