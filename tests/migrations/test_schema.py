from __future__ import annotations

import hashlib

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from loramux.migrations.cache_triggers import install_cache_triggers
from loramux.migrations.database import Database
from loramux.migrations.schema import metadata
from loramux.migrations.storage_triggers import install_storage_triggers
from tests.migrations.schema_lines import schema_lines

FIRST_STEP = {
    "sqlite": "e8c2b0abd4e8e0dcf6d79e7c6d6be3570ce3e3412d0f462b8ead64e6e6b7625a",
    "postgresql": "ca836baacdd8cefdcc9e6873ca91e83820dc8677b3126bebb0d92863a4d3df11",
}
"""SHA-256 of the schema that commit db435589 creates with steps 0001 to 0021."""


def test_migrations_make_exactly_the_schema(database: Database) -> None:
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        migrated = schema_lines(connection)
    with database.write() as connection:
        metadata.drop_all(connection)
        metadata.create_all(connection)
        install_cache_triggers(connection)
        install_storage_triggers(connection)
        # `schema.py` orders columns by meaning. A step can only append them.
        assert sorted(schema_lines(connection)) == sorted(migrated)


def test_first_step_creates_what_the_steps_before_it_created(database_url: str) -> None:
    """Databases upgraded from an older version have this schema, so later steps can rely on its names."""
    database = Database(database_url)
    command.upgrade(database._alembic_config(), "0021")
    with database.read() as connection:
        lines = schema_lines(connection)
        kind = connection.dialect.name
    database.close()
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == FIRST_STEP[kind], "\n".join(lines)


@pytest.mark.parametrize(
    ("table", "statements"),
    [
        pytest.param("tenants", ["ALTER TABLE tenants ADD COLUMN later INTEGER"], id="column"),
        pytest.param("prices", ["CREATE INDEX ix_later ON prices (currency)"], id="index"),
        pytest.param(
            "adapter_versions",
            [
                "DROP INDEX ix_adapter_versions_pinned",
                "CREATE INDEX ix_adapter_versions_pinned ON adapter_versions (pinned_us)",
            ],
            id="condition of an index",
        ),
        pytest.param(
            "signals",
            ["DROP TABLE signals", "CREATE TABLE signals (name VARCHAR(16) NOT NULL, value BIGINT DEFAULT 1 NOT NULL)"],
            id="default and key",
        ),
    ],
)
def test_schema_lines_show_a_difference(database: Database, table: str, statements: list[str]) -> None:
    with database.write() as connection:
        before = set(schema_lines(connection))
        for statement in statements:
            connection.exec_driver_sql(statement)
        changed = before ^ set(schema_lines(connection))
    assert changed
    assert all(table in line for line in changed)
