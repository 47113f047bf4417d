"""Count the bytes stored for each tenant."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"

_COUNT = """
INSERT INTO stored_bytes (tenant_id, num_bytes)
SELECT tenant_id, sum(num_bytes) FROM (
    SELECT tenant_id, octet_length(content) AS num_bytes FROM responses
    UNION ALL SELECT tenant_id, octet_length(completion) + octet_length(messages) FROM chat_completions
    UNION ALL SELECT tenant_id, num_bytes FROM conversations
) AS sizes GROUP BY tenant_id
"""


def upgrade() -> None:
    op.create_table(
        "stored_bytes",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
        sa.PrimaryKeyConstraint("tenant_id"),
    )
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    op.execute(_COUNT.replace("octet_length", "length") if is_sqlite else _COUNT)
