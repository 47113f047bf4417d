"""Add quota modes, budgets, tenants' timezones, and quota policies for the platform, keys and adapters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_ID = sa.String(length=40)


def upgrade() -> None:
    op.add_column("tenants", sa.Column("timezone", sa.String(length=64), nullable=False, server_default="UTC"))
    # SQLite cannot change a table's keys. Both tables are small, so recreate them with their rows.
    policies, counters = _take_down("quota_policies"), _take_down("quota_counters")
    op.drop_table("quota_counters")
    op.drop_table("quota_policies")
    _create_tables()
    _fill(
        "quota_policies",
        [{**row, "scope": "tenant", "subject_id": row["tenant_id"], "mode": "hard"} for row in policies],
    )
    subjects = {row["id"]: row["tenant_id"] for row in policies}
    _fill(
        "quota_counters",
        [{**row, "subject_id": subjects[row["policy_id"]], "used": 0, "exceeded": 0} for row in counters],
    )


def _take_down(name: str) -> list[dict[str, object]]:
    table = sa.Table(name, sa.MetaData(), autoload_with=op.get_bind())
    return [dict(row) for row in op.get_bind().execute(sa.select(table)).mappings()]


def _fill(name: str, rows: list[dict[str, object]]) -> None:
    if rows:
        table = sa.Table(name, sa.MetaData(), autoload_with=op.get_bind())
        op.get_bind().execute(table.insert(), rows)


def _create_tables() -> None:
    op.create_table(
        "quota_policies",
        sa.Column("id", _ID, nullable=False),
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("subject_id", _ID, nullable=False),
        sa.Column("tenant_id", _ID, nullable=True),
        sa.Column("metric", sa.String(length=40), nullable=False),
        sa.Column("mode", sa.String(length=8), nullable=False),
        sa.Column("limit_value", sa.BigInteger(), nullable=False),
        sa.Column("burst", sa.BigInteger(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("updated_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("limit_value >= 0 AND burst >= 0", name=op.f("ck_quota_policies_amounts")),
        sa.CheckConstraint("scope IN ('platform', 'tenant', 'key', 'adapter')", name=op.f("ck_quota_policies_scope")),
        sa.CheckConstraint("mode IN ('hard', 'soft', 'shadow')", name=op.f("ck_quota_policies_mode")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_quota_policies_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quota_policies")),
        sa.UniqueConstraint("subject_id", "metric", name=op.f("uq_quota_policies_subject_id")),
    )
    op.create_index("ix_quota_policies_tenant_id_id", "quota_policies", ["tenant_id", "id"])
    op.create_table(
        "quota_counters",
        sa.Column("policy_id", _ID, nullable=False),
        sa.Column("subject_id", _ID, nullable=False),
        sa.Column("window_start_us", sa.BigInteger(), nullable=False),
        sa.Column("level", sa.BigInteger(), nullable=False),
        sa.Column("reserved", sa.BigInteger(), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.Column("exceeded", sa.BigInteger(), nullable=False),
        sa.Column("refilled_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["policy_id"], ["quota_policies.id"], name=op.f("fk_quota_counters_policy_id_quota_policies")
        ),
        sa.PrimaryKeyConstraint("policy_id", "subject_id", "window_start_us", name=op.f("pk_quota_counters")),
    )


def downgrade() -> None:
    """Raise an error, because the older schema cannot express scopes, modes and budgets."""
    raise NotImplementedError("scoped quota policies cannot be expressed in the older schema")
