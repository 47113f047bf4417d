"""Add an index for pages of a tenant's requests."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_usage_events_tenant_request", "usage_events", ["tenant_id", "request_id"])


def downgrade() -> None:
    op.drop_index("ix_usage_events_tenant_request", "usage_events")
