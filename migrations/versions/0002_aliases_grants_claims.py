"""Add weighted aliases with a history, grants, claims on versions, and the states quarantined and archived."""

from __future__ import annotations

import hashlib

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_STATES_BEFORE = "state IN ('pending', 'validating', 'ready', 'rejected')"
_STATES = "state IN ('pending', 'validating', 'ready', 'rejected', 'quarantined', 'archived')"


def upgrade() -> None:
    with op.batch_alter_table("adapters", recreate="never") as batch:
        batch.add_column(sa.Column("disabled_us", sa.BigInteger(), nullable=True))
        batch.create_index("ix_adapters_tenant_id_id", ["tenant_id", "id"], unique=False)
    with op.batch_alter_table("uploads", recreate="never") as batch:
        batch.add_column(sa.Column("source_url", sa.String(length=1200), nullable=True))
        batch.create_index("ix_uploads_state_expires", ["state", "expires_us"], unique=False)
    aliases = _aliases()
    # SQLite can change a check constraint only by recreating the table. Meanwhile, no foreign key may reference it.
    op.drop_table("adapter_aliases")
    with op.batch_alter_table("adapter_versions") as batch:
        batch.add_column(sa.Column("files_sha256", sa.String(length=64), nullable=True))
        batch.add_column(sa.Column("claimed_by", sa.String(length=40), nullable=True))
        batch.add_column(sa.Column("claim_expires_us", sa.BigInteger(), nullable=True))
        batch.drop_constraint(op.f("ck_adapter_versions_state"), type_="check")
        batch.create_check_constraint(op.f("ck_adapter_versions_state"), _STATES)
        batch.create_index("ix_adapter_versions_adapter_id_id", ["adapter_id", "id"], unique=False)
        batch.create_index("ix_adapter_versions_adapter_id_files", ["adapter_id", "files_sha256"], unique=False)
        batch.create_index(
            "ix_adapter_versions_state_id",
            ["state", "id"],
            unique=False,
            postgresql_where=sa.text("state IN ('pending', 'validating')"),
        )
    _create_tables()
    _insert_aliases(aliases)
    _fill_files_sha256()


def _aliases() -> list[sa.Row[tuple[str, str, str, int, int]]]:
    query = """
        SELECT a.adapter_id, a.name, a.version_id, v.number, a.updated_us
        FROM adapter_aliases a JOIN adapter_versions v ON v.id = a.version_id
    """
    return list(op.get_bind().execute(sa.text(query)))


def _create_tables() -> None:
    op.create_table(
        "adapter_aliases",
        sa.Column("adapter_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("updated_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_adapter_aliases_adapter_id_adapters")),
        sa.PrimaryKeyConstraint("adapter_id", "name", name=op.f("pk_adapter_aliases")),
    )
    op.create_table(
        "adapter_alias_targets",
        sa.Column("adapter_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("version_id", sa.String(length=40), nullable=False),
        sa.Column("weight", sa.Integer(), nullable=False),
        sa.CheckConstraint("weight > 0", name=op.f("ck_adapter_alias_targets_weight")),
        sa.ForeignKeyConstraint(
            ["adapter_id", "name"],
            ["adapter_aliases.adapter_id", "adapter_aliases.name"],
            name=op.f("fk_adapter_alias_targets_adapter_id_adapter_aliases"),
        ),
        sa.ForeignKeyConstraint(
            ["version_id"], ["adapter_versions.id"], name=op.f("fk_adapter_alias_targets_version_id_adapter_versions")
        ),
        sa.PrimaryKeyConstraint("adapter_id", "name", "version_id", name=op.f("pk_adapter_alias_targets")),
    )
    op.create_index("ix_adapter_alias_targets_version_id", "adapter_alias_targets", ["version_id"])
    op.create_table(
        "adapter_alias_history",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("adapter_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("actor", sa.String(length=40), nullable=False),
        sa.Column("action", sa.String(length=16), nullable=False),
        sa.Column("targets", sa.JSON(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("action IN ('set', 'rollback')", name=op.f("ck_adapter_alias_history_action")),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name=op.f("fk_adapter_alias_history_adapter_id_adapters")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_alias_history")),
        sa.UniqueConstraint("adapter_id", "name", "revision", name=op.f("uq_adapter_alias_history_adapter_id")),
    )
    op.create_table(
        "adapter_grants",
        sa.Column("adapter_id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_adapter_grants_adapter_id_adapters")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_adapter_grants_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("adapter_id", "tenant_id", name=op.f("pk_adapter_grants")),
    )
    op.create_index("ix_adapter_grants_tenant_id", "adapter_grants", ["tenant_id"])


def _insert_aliases(aliases: list[sa.Row[tuple[str, str, str, int, int]]]) -> None:
    """Insert each existing alias with its one version, and begin the alias's history with that version."""
    made = sa.MetaData()
    bind = op.get_bind()
    parents = sa.Table("adapter_aliases", made, autoload_with=bind)
    targets = sa.Table("adapter_alias_targets", made, autoload_with=bind)
    history = sa.Table("adapter_alias_history", made, autoload_with=bind)
    for number, alias in enumerate(aliases):
        key = {"adapter_id": alias.adapter_id, "name": alias.name}
        bind.execute(parents.insert().values(**key, revision=1, updated_us=alias.updated_us))
        bind.execute(targets.insert().values(**key, version_id=alias.version_id, weight=100))
        bind.execute(
            history.insert().values(
                **key,
                id=f"alh_{number:032x}",
                revision=1,
                actor="system",
                action="set",
                targets=[{"version_id": alias.version_id, "number": alias.number, "weight": 100}],
                created_us=alias.updated_us,
            )
        )


def _fill_files_sha256() -> None:
    """Set the SHA-256 of each upload's two file checksums, the configuration's first, to detect identical uploads."""
    made = sa.MetaData()
    bind = op.get_bind()
    versions = sa.Table("adapter_versions", made, autoload_with=bind)
    uploads = sa.Table("uploads", made, sa.Column("files", sa.JSON), autoload_with=bind)
    query = sa.select(versions.c.id, uploads.c.files).join(uploads, uploads.c.id == versions.c.upload_id)
    for version_id, files in bind.execute(query).all():
        checksums = "".join(file["sha256"] for file in sorted(files, key=lambda file: str(file["name"])))
        sha256 = hashlib.sha256(checksums.encode()).hexdigest()
        bind.execute(versions.update().where(versions.c.id == version_id).values(files_sha256=sha256))


def downgrade() -> None:
    """Raise an error, because the older schema cannot express weights, states and grants."""
    raise NotImplementedError("weighted aliases cannot be expressed in the older schema")
