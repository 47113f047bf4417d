"""Create the schema.

A database with a schema before 0021 must first be upgraded by commit db435589. The names of constraints and the order
of columns are the same as in such a database. `env.py` adds the triggers.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = None

_ID, _NAME, _MODEL, _STATE, _SHA256 = (sa.String(length) for length in (40, 63, 200, 16, 64))
_SECRET = sa.LargeBinary(32)
_INTEGER, _BIG, _JSON = sa.Integer(), sa.BigInteger(), sa.JSON()
_USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens")
_SERIES = (
    "tenant_id",
    "api_key_id",
    "adapter_id",
    "adapter_version_id",
    "model",
    "base",
    "endpoint",
    "end_user",
    "status",
)


def upgrade() -> None:
    _create_accounts()
    _create_adapters()
    _create_versions()
    _create_bases()
    _create_aliases()
    _create_uploads()
    _create_quotas()
    _create_reservations()
    _create_ledger()
    _create_rollups()
    _create_prices()
    _create_logs()
    _create_sessions()
    _create_replicas()


def _create_accounts() -> None:
    op.create_table(
        "tenants",
        *_required(_ID, "id"),
        *_required(_NAME, "slug"),
        *_required(sa.String(200), "display_name"),
        *_required(_STATE, "state"),
        *_required(_INTEGER, "weight"),
        *_required(_SECRET, "isolation_secret"),
        *_required(_BIG, "created_us"),
        *_required(_BIG, "host_floor_bytes", default="0"),
        *_required(sa.String(64), "timezone", default="UTC"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("slug"),
        sa.CheckConstraint("state IN ('active', 'suspended')", name="state"),
    )
    op.create_table(
        "api_keys",
        *_required(_ID, "id"),
        *_optional(_ID, "tenant_id"),
        *_required(sa.String(16), "public_id"),
        *_required(_SECRET, "secret_sha256"),
        *_required(sa.String(200), "name"),
        *_required(_JSON, "scopes"),
        *_required(_BIG, "created_us"),
        *_optional(_BIG, "expires_us", "revoked_us"),
        *_optional(_JSON, "adapter_ids"),
        *_optional(_SECRET, "previous_sha256"),
        *_optional(_BIG, "previous_until_us", "rotated_us"),
        _refers("tenant_id", "tenants.id"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("public_id"),
    )
    op.create_index("ix_api_keys_tenant_id_id", "api_keys", ["tenant_id", "id"])


def _create_adapters() -> None:
    op.create_table(
        "adapters",
        *_required(_ID, "id", "tenant_id"),
        *_required(_NAME, "name"),
        *_required(_BIG, "created_us"),
        *_optional(_BIG, "disabled_us"),
        _refers("tenant_id", "tenants.id"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("tenant_id", "name"),
    )
    op.create_index("ix_adapters_tenant_id_id", "adapters", ["tenant_id", "id"])
    op.create_table(
        "adapter_grants",
        *_required(_ID, "adapter_id", "tenant_id"),
        *_required(_BIG, "created_us"),
        _refers("adapter_id", "adapters.id"),
        _refers("tenant_id", "tenants.id"),
        sa.PrimaryKeyConstraint("adapter_id", "tenant_id"),
    )
    op.create_index("ix_adapter_grants_tenant_id", "adapter_grants", ["tenant_id"])


def _create_versions() -> None:
    op.create_table(
        "adapter_versions",
        *_required(_ID, "id", "adapter_id"),
        *_required(_INTEGER, "number"),
        *_required(_STATE, "state"),
        *_optional(_SHA256, "digest"),
        *_optional(_INTEGER, "max_rank", "num_pages"),
        *_optional(_BIG, "canonical_bytes"),
        *_required(_ID, "upload_id"),
        *_required(_JSON, "report"),
        *_required(_BIG, "created_us"),
        *_optional(_BIG, "ready_us"),
        *_optional(_SHA256, "files_sha256"),
        *_optional(_ID, "claimed_by"),
        *_optional(_BIG, "claim_expires_us", "pinned_us"),
        *_optional(_SHA256, "version_digest"),
        *_optional(_JSON, "invocation_tokens"),
        *_optional(sa.String(64), "base_id"),
        _refers("adapter_id", "adapters.id"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("adapter_id", "number"),
        sa.CheckConstraint(
            "state IN ('pending', 'validating', 'ready', 'rejected', 'quarantined', 'archived')", name="state"
        ),
    )
    op.create_index("ix_adapter_versions_digest", "adapter_versions", ["digest"])
    op.create_index("ix_adapter_versions_adapter_id_id", "adapter_versions", ["adapter_id", "id"])
    op.create_index("ix_adapter_versions_adapter_id_files", "adapter_versions", ["adapter_id", "files_sha256"])
    is_unfinished, is_pinned = sa.text("state IN ('pending', 'validating')"), sa.text("pinned_us IS NOT NULL")
    op.create_index("ix_adapter_versions_state_id", "adapter_versions", ["state", "id"], postgresql_where=is_unfinished)
    op.create_index(
        "ix_adapter_versions_pinned",
        "adapter_versions",
        ["pinned_us"],
        postgresql_where=is_pinned,
        sqlite_where=is_pinned,
    )
    op.create_table(
        "adapter_version_files",
        *_required(_ID, "version_id"),
        *_required(_NAME, "name"),
        *_required(_INTEGER, "size"),
        *_required(_SHA256, "sha256"),
        *_required(sa.LargeBinary(), "content"),
        _refers("version_id", "adapter_versions.id"),
        sa.PrimaryKeyConstraint("version_id", "name"),
    )


def _create_bases() -> None:
    op.create_table(
        "bases",
        *_required(sa.String(64), "id"),
        *_required(_MODEL, "served_name"),
        *_required(_BIG, "created_us"),
        *_optional(_SHA256, "prompt_sha256"),
        *_optional(_INTEGER, "weight"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "base_servers",
        *_required(_ID, "id"),
        *_required(sa.String(64), "base_id"),
        *_required(sa.String(300), "address"),
        *_required(_STATE, "state"),
        *_required(_BIG, "seen_us"),
        _refers("base_id", "bases.id"),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("state IN ('serving', 'draining')", name="state"),
    )
    op.create_table(
        "version_bases",
        *_required(_ID, "version_id"),
        *_required(sa.String(64), "base_id"),
        *_required(_STATE, "state"),
        *_optional(_ID, "claimed_by"),
        *_optional(_BIG, "claim_expires_us"),
        *_optional(sa.String(64), "code"),
        *_optional(sa.String(1000), "message"),
        *_optional(_BIG, "checked_us"),
        _refers("base_id", "bases.id"),
        _refers("version_id", "adapter_versions.id"),
        sa.PrimaryKeyConstraint("version_id", "base_id"),
        sa.CheckConstraint("state IN ('validating', 'ready', 'rejected')", name="state"),
    )
    op.create_index("ix_version_bases_base_id_state", "version_bases", ["base_id", "state", "version_id"])


def _create_aliases() -> None:
    op.create_table(
        "adapter_aliases",
        *_required(_ID, "adapter_id"),
        *_required(_NAME, "name"),
        *_required(_INTEGER, "revision"),
        *_required(_BIG, "updated_us"),
        _refers("adapter_id", "adapters.id"),
        sa.PrimaryKeyConstraint("adapter_id", "name"),
    )
    op.create_table(
        "adapter_alias_targets",
        *_required(_ID, "adapter_id"),
        *_required(_NAME, "name"),
        *_required(_ID, "version_id"),
        *_required(_INTEGER, "weight"),
        sa.ForeignKeyConstraint(["adapter_id", "name"], ["adapter_aliases.adapter_id", "adapter_aliases.name"]),
        _refers("version_id", "adapter_versions.id"),
        sa.PrimaryKeyConstraint("adapter_id", "name", "version_id"),
        sa.CheckConstraint("weight > 0", name="weight"),
    )
    op.create_index("ix_adapter_alias_targets_version_id", "adapter_alias_targets", ["version_id"])
    op.create_table(
        "adapter_alias_history",
        *_required(_ID, "id", "adapter_id"),
        *_required(_NAME, "name"),
        *_required(_INTEGER, "revision"),
        *_required(_ID, "actor"),
        *_required(_STATE, "action"),
        *_required(_JSON, "targets"),
        *_required(_BIG, "created_us"),
        _refers("adapter_id", "adapters.id"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("adapter_id", "name", "revision"),
        sa.CheckConstraint("action IN ('set', 'rollback')", name="action"),
    )


def _create_uploads() -> None:
    op.create_table(
        "uploads",
        *_required(_ID, "id", "adapter_id"),
        *_required(_JSON, "files"),
        *_required(_STATE, "state"),
        *_required(_BIG, "created_us", "expires_us"),
        *_optional(sa.String(1200), "source_url"),
        _refers("adapter_id", "adapters.id"),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("state IN ('open', 'used')", name="state"),
    )
    op.create_index("ix_uploads_state_expires", "uploads", ["state", "expires_us"])
    op.create_table(
        "retired_numbers",
        *_required(sa.String(127), "model"),
        *_required(_INTEGER, "last_number"),
        sa.PrimaryKeyConstraint("model"),
    )
    op.create_table(
        "purges",
        *_required(sa.String(64), "id"),
        *_required(sa.String(8), "kind", "state"),
        *_required(_BIG, "purged_us"),
        *_optional(_BIG, "due_us"),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("kind IN ('digest', 'version')", name="kind"),
        sa.CheckConstraint("state IN ('deleting', 'deleted')", name="state"),
    )


def _create_quotas() -> None:
    op.create_table(
        "quota_policies",
        *_required(_ID, "id"),
        *_required(sa.String(16), "scope"),
        *_required(_ID, "subject_id"),
        *_optional(_ID, "tenant_id"),
        *_required(sa.String(40), "metric"),
        *_required(sa.String(8), "mode"),
        *_required(_BIG, "limit_value", "burst", "created_us", "updated_us"),
        _refers("tenant_id", "tenants.id"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("subject_id", "metric"),
        sa.CheckConstraint("limit_value >= 0 AND burst >= 0", name="amounts"),
        sa.CheckConstraint("scope IN ('platform', 'tenant', 'key', 'adapter')", name="scope"),
        sa.CheckConstraint("mode IN ('hard', 'soft', 'shadow')", name="mode"),
    )
    op.create_index("ix_quota_policies_tenant_id_id", "quota_policies", ["tenant_id", "id"])
    op.create_table(
        "quota_counters",
        *_required(_ID, "policy_id", "subject_id"),
        *_required(_BIG, "window_start_us", "level", "reserved", "used", "exceeded", "refilled_us"),
        _refers("policy_id", "quota_policies.id"),
        sa.PrimaryKeyConstraint("policy_id", "subject_id", "window_start_us"),
    )


def _create_reservations() -> None:
    op.create_table(
        "reservations",
        *_required(_ID, "id", "tenant_id", "api_key_id"),
        *_optional(_ID, "adapter_version_id"),
        *_required(_MODEL, "model"),
        *_required(sa.String(40), "endpoint"),
        *_required(_STATE, "state"),
        *_required(_BIG, "prompt_tokens", "reserved_tokens"),
        *_required(_JSON, "charges"),
        *_required(_BIG, "checkpoint_tokens", "created_us", "lease_expires_us"),
        *_optional(_BIG, "cancel_requested_us"),
        *_required(_MODEL, "base", default=""),
        *_optional(sa.String(128), "end_user"),
        _refers("api_key_id", "api_keys.id"),
        _refers("tenant_id", "tenants.id"),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("state IN ('open', 'settled', 'recovered')", name="state"),
    )
    op.create_index("ix_reservations_state_lease", "reservations", ["state", "lease_expires_us"])


def _create_ledger() -> None:
    op.create_table(
        "usage_events",
        *_required(_ID, "request_id", "tenant_id", "api_key_id"),
        *_optional(_ID, "adapter_id", "adapter_version_id"),
        *_required(_MODEL, "model"),
        *_required(sa.String(40), "endpoint"),
        *_required(_STATE, "status"),
        *_required(_BIG, *_USAGE, "started_us", "finished_us"),
        *_optional(_BIG, "first_token_us"),
        *_required(_MODEL, "base", default=""),
        *_optional(sa.String(128), "end_user"),
        *_required(_BIG, "cost_nanos", default="0"),
        *_optional(_ID, "price_id"),
        *_required(_BIG, "batch_id", default="0"),
        _refers("tenant_id", "tenants.id"),
        sa.PrimaryKeyConstraint("request_id"),
    )
    op.create_index("ix_usage_events_tenant_finished", "usage_events", ["tenant_id", "finished_us"])
    op.create_index("ix_usage_events_finished", "usage_events", ["finished_us"])
    op.create_index("ix_usage_events_tenant_request", "usage_events", ["tenant_id", "request_id"])
    op.create_table(
        "usage_adjustments",
        *_required(_ID, "id", "request_id", "tenant_id"),
        *_required(_BIG, *_USAGE, "created_us"),
        *_required(_BIG, "cost_nanos", "batch_id", default="0"),
        _refers("request_id", "usage_events.request_id"),
        _refers("tenant_id", "tenants.id"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("request_id"),
    )
    op.create_index("ix_usage_adjustments_tenant_created", "usage_adjustments", ["tenant_id", "created_us"])
    op.create_index("ix_usage_adjustments_created", "usage_adjustments", ["created_us"])


def _create_rollups() -> None:
    op.create_table(
        "usage_batches",
        sa.Column("id", _BIG, autoincrement=False, nullable=False),
        *_required(_BIG, "at_us"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "usage_series",
        *_required(sa.BigInteger().with_variant(sa.Integer(), "sqlite"), "id"),
        *_required(_ID, "tenant_id", "api_key_id", "adapter_id", "adapter_version_id"),
        *_required(_MODEL, "model", "base"),
        *_required(sa.String(40), "endpoint"),
        *_required(sa.String(128), "end_user"),
        *_required(_STATE, "status"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint(*_SERIES),
    )
    op.create_table(
        "usage_rollups",
        *_required(sa.SmallInteger(), "grain"),
        *_required(_BIG, "span_us", "start_us"),
        *_required(_ID, "tenant_id"),
        *_required(_BIG, "series_id", "requests", *_USAGE, "cost_nanos"),
        _refers("series_id", "usage_series.id"),
        sa.PrimaryKeyConstraint("grain", "span_us", "start_us", "tenant_id", "series_id"),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_usage_rollups_tenant_span_start", "usage_rollups", ["tenant_id", "grain", "span_us", "start_us"]
    )


def _create_prices() -> None:
    op.create_table(
        "prices",
        *_required(_ID, "id"),
        *_optional(_ID, "tenant_id"),
        *_required(_ID, "scope"),
        *_required(sa.String(3), "currency"),
        *_required(_BIG, "prompt_nanos", "cached_nanos", "completion_nanos", "effective_us", "created_us"),
        _refers("tenant_id", "tenants.id"),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint(
            "prompt_nanos >= 0 AND cached_nanos >= 0 AND completion_nanos >= 0 AND cached_nanos <= prompt_nanos",
            name="amounts",
        ),
    )
    op.create_index("ix_prices_tenant_id_id", "prices", ["tenant_id", "id"])


def _create_logs() -> None:
    op.create_table(
        "audit_log",
        *_required(_ID, "id"),
        *_required(_BIG, "created_us"),
        *_required(_ID, "actor"),
        *_optional(sa.String(64), "address"),
        *_optional(_ID, "request_id"),
        *_required(sa.String(40), "action"),
        *_optional(_ID, "tenant_id"),
        *_required(sa.String(200), "target"),
        *_required(_JSON, "changes"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_audit_log_tenant_id_id", "audit_log", ["tenant_id", "id"])
    op.create_index("ix_audit_log_target_id", "audit_log", ["target", "id"])
    op.create_table(
        "signals",
        *_required(sa.String(16), "name"),
        *_required(_BIG, "value"),
        sa.PrimaryKeyConstraint("name"),
    )


def _create_sessions() -> None:
    op.create_table(
        "idempotency_keys",
        *_required(sa.String(200), "principal"),
        *_required(sa.LargeBinary(32), "key_sha256", "request_sha256"),
        *_optional(_INTEGER, "status"),
        *_required(_JSON, "headers"),
        *_required(sa.LargeBinary(), "body"),
        *_required(_BIG, "created_us", "expires_us"),
        sa.PrimaryKeyConstraint("principal", "key_sha256"),
    )
    op.create_index("ix_idempotency_keys_expires", "idempotency_keys", ["expires_us"])
    op.create_table(
        "console_sessions",
        *_required(sa.LargeBinary(32), "id_sha256"),
        *_required(sa.String(64), "key_id"),
        *_required(sa.LargeBinary(), "sealed"),
        *_required(_BIG, "created_us", "expires_us"),
        sa.PrimaryKeyConstraint("id_sha256"),
    )
    op.create_index("ix_console_sessions_key_created", "console_sessions", ["key_id", "created_us"])
    op.create_index("ix_console_sessions_expires", "console_sessions", ["expires_us"])
    op.create_table(
        "login_failures",
        *_required(sa.String(64), "origin"),
        *_required(_BIG, "forgiven_us"),
        sa.PrimaryKeyConstraint("origin"),
    )
    op.create_index("ix_login_failures_forgiven", "login_failures", ["forgiven_us"])


def _create_replicas() -> None:
    op.create_table(
        "replicas",
        *_required(_ID, "id"),
        *_required(sa.String(300), "address"),
        *_required(sa.String(64), "base"),
        *_required(sa.String(40), "version"),
        *_required(_INTEGER, "protocol"),
        *_required(_STATE, "state"),
        *_required(_BIG, "beat"),
        *_required(_INTEGER, "num_running", "num_waiting", "capacity", "num_pages", "num_free_pages"),
        *_required(sa.String(8192), "certificates"),
        *_optional(sa.String(64), "base_id"),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("state IN ('serving', 'draining')", name="state"),
    )
    op.create_table(
        "adapter_residency",
        *_required(_ID, "replica_id"),
        *_required(_BIG, "version"),
        *_required(sa.LargeBinary(32768), "summary"),
        _refers("replica_id", "replicas.id"),
        sa.PrimaryKeyConstraint("replica_id"),
        sa.CheckConstraint("length(summary) <= 32768", name="summary"),
    )


def _required(kind: sa.types.TypeEngine[Any], *names: str, default: str | None = None) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False, server_default=default) for name in names]


def _optional(kind: sa.types.TypeEngine[Any], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=True) for name in names]


def _refers(column: str, target: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [target])
