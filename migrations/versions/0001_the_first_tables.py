"""Create the first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("slug", sa.String(length=63), nullable=False),
        sa.Column("display_name", sa.String(length=200), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("weight", sa.Integer(), nullable=False),
        sa.Column("isolation_secret", sa.LargeBinary(length=32), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('active', 'suspended')", name=op.f("ck_tenants_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("slug", name=op.f("uq_tenants_slug")),
    )
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_adapters_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapters")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_adapters_tenant_id")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=True),
        sa.Column("public_id", sa.String(length=16), nullable=False),
        sa.Column("secret_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=True),
        sa.Column("revoked_us", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("public_id", name=op.f("uq_api_keys_public_id")),
    )
    with op.batch_alter_table("api_keys", schema=None) as batch_op:
        batch_op.create_index("ix_api_keys_tenant_id_id", ["tenant_id", "id"], unique=False)

    op.create_table(
        "quota_policies",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("metric", sa.String(length=40), nullable=False),
        sa.Column("limit_value", sa.BigInteger(), nullable=False),
        sa.Column("burst", sa.BigInteger(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("updated_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("limit_value >= 0 AND burst >= 0", name=op.f("ck_quota_policies_amounts")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_quota_policies_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quota_policies")),
        sa.UniqueConstraint("tenant_id", "metric", name=op.f("uq_quota_policies_tenant_id")),
    )
    op.create_table(
        "usage_events",
        sa.Column("request_id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("api_key_id", sa.String(length=40), nullable=False),
        sa.Column("adapter_id", sa.String(length=40), nullable=True),
        sa.Column("adapter_version_id", sa.String(length=40), nullable=True),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("endpoint", sa.String(length=40), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("started_us", sa.BigInteger(), nullable=False),
        sa.Column("finished_us", sa.BigInteger(), nullable=False),
        sa.Column("first_token_us", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_usage_events_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_usage_events")),
    )
    with op.batch_alter_table("usage_events", schema=None) as batch_op:
        batch_op.create_index("ix_usage_events_tenant_finished", ["tenant_id", "finished_us"], unique=False)

    op.create_table(
        "adapter_versions",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("adapter_id", sa.String(length=40), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("max_rank", sa.Integer(), nullable=True),
        sa.Column("num_pages", sa.Integer(), nullable=True),
        sa.Column("canonical_bytes", sa.BigInteger(), nullable=True),
        sa.Column("upload_id", sa.String(length=40), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("ready_us", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "state IN ('pending', 'validating', 'ready', 'rejected')", name=op.f("ck_adapter_versions_state")
        ),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_adapter_versions_adapter_id_adapters")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_versions")),
        sa.UniqueConstraint("adapter_id", "number", name=op.f("uq_adapter_versions_adapter_id")),
    )
    with op.batch_alter_table("adapter_versions", schema=None) as batch_op:
        batch_op.create_index("ix_adapter_versions_digest", ["digest"], unique=False)

    op.create_table(
        "quota_counters",
        sa.Column("policy_id", sa.String(length=40), nullable=False),
        sa.Column("window_start_us", sa.BigInteger(), nullable=False),
        sa.Column("level", sa.BigInteger(), nullable=False),
        sa.Column("reserved", sa.BigInteger(), nullable=False),
        sa.Column("refilled_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["policy_id"], ["quota_policies.id"], name=op.f("fk_quota_counters_policy_id_quota_policies")
        ),
        sa.PrimaryKeyConstraint("policy_id", "window_start_us", name=op.f("pk_quota_counters")),
    )
    op.create_table(
        "reservations",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("api_key_id", sa.String(length=40), nullable=False),
        sa.Column("adapter_version_id", sa.String(length=40), nullable=True),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("endpoint", sa.String(length=40), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("reserved_tokens", sa.BigInteger(), nullable=False),
        sa.Column("charges", sa.JSON(), nullable=False),
        sa.Column("checkpoint_tokens", sa.BigInteger(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("lease_expires_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('open', 'settled', 'recovered')", name=op.f("ck_reservations_state")),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_keys.id"], name=op.f("fk_reservations_api_key_id_api_keys")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_reservations_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reservations")),
    )
    with op.batch_alter_table("reservations", schema=None) as batch_op:
        batch_op.create_index("ix_reservations_state_lease", ["state", "lease_expires_us"], unique=False)

    op.create_table(
        "uploads",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("adapter_id", sa.String(length=40), nullable=False),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('open', 'used')", name=op.f("ck_uploads_state")),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_uploads_adapter_id_adapters")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_table(
        "adapter_aliases",
        sa.Column("adapter_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("version_id", sa.String(length=40), nullable=False),
        sa.Column("updated_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_adapter_aliases_adapter_id_adapters")),
        sa.ForeignKeyConstraint(
            ["version_id"], ["adapter_versions.id"], name=op.f("fk_adapter_aliases_version_id_adapter_versions")
        ),
        sa.PrimaryKeyConstraint("adapter_id", "name", name=op.f("pk_adapter_aliases")),
    )


def downgrade() -> None:
    op.drop_table("adapter_aliases")
    op.drop_table("uploads")
    with op.batch_alter_table("reservations", schema=None) as batch_op:
        batch_op.drop_index("ix_reservations_state_lease")

    op.drop_table("reservations")
    op.drop_table("quota_counters")
    with op.batch_alter_table("adapter_versions", schema=None) as batch_op:
        batch_op.drop_index("ix_adapter_versions_digest")

    op.drop_table("adapter_versions")
    with op.batch_alter_table("usage_events", schema=None) as batch_op:
        batch_op.drop_index("ix_usage_events_tenant_finished")

    op.drop_table("usage_events")
    op.drop_table("quota_policies")
    with op.batch_alter_table("api_keys", schema=None) as batch_op:
        batch_op.drop_index("ix_api_keys_tenant_id_id")

    op.drop_table("api_keys")
    op.drop_table("adapters")
    op.drop_table("tenants")
