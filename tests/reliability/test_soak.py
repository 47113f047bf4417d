from __future__ import annotations

from pathlib import Path

from loramux.migrations.database import Database
from loramux.migrations.schema import metadata
from loramux.platform.accounts.tenants import Tenants
from tests.migrated import migrated_sqlite
from tests.reliability.soak import KEPT, stored


def test_rows_of_all_other_tables_and_files_outside_the_database_are_counted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "blobs").mkdir(parents=True)
    database = Database(migrated_sqlite(data / "loramux.db"))
    before = stored(database, data)
    assert KEPT.keys() <= metadata.tables.keys()
    assert before.keys() == {f"{name}: rows" for name in metadata.tables.keys() - KEPT.keys()} | {"files", "files, MB"}
    assert (before["files"], before["files, MB"]) == (0, 0)
    Tenants(database).create("acme")
    (data / "blobs" / "one").write_bytes(bytes(3_000_000))
    after = stored(database, data)
    database.close()
    changed = {name: after[name] - number for name, number in before.items() if after[name] != number}
    # The first change of a tenant also creates the signal for the caches.
    assert changed == {"tenants: rows": 1, "signals: rows": 1, "files": 1, "files, MB": 3}
