"""Databases with the current schema. Copying a migrated database is a hundred times faster than migrating a new one.

The migrations themselves are tested in tests/migrations.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from loramux.migrations.database import Database


def migrated_sqlite(file: Path) -> str:
    """Create a SQLite database with the current schema at `file` and return its URL."""
    shutil.copyfile(Path(_sqlite_folder().name, "loramux.db"), file)
    return f"sqlite:///{file}"


@cache
def _sqlite_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary directory with a migrated database, kept until the process exits."""
    folder = tempfile.TemporaryDirectory(prefix="loramux-migrated-")
    migrate(f"sqlite:///{folder.name}/loramux.db")
    return folder


def migrate(url: str) -> None:
    """Upgrade a database to the current schema and close it."""
    database = Database(url)
    database.upgrade()
    database.close()
