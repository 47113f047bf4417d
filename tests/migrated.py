"""Databases with the current schema, copied from one that the migrations made: a copy takes a hundredth of their time.

What the migrations do is tested where they are, in tests/migrations.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from loramux.migrations.database import Database


def migrated_sqlite(file: Path) -> str:
    """Make `file` a database with the current schema; gives its URL."""
    shutil.copyfile(Path(_sqlite_folder().name, "loramux.db"), file)
    return f"sqlite:///{file}"


@cache
def _sqlite_folder() -> tempfile.TemporaryDirectory[str]:
    """Lives as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="loramux-migrated-")
    migrate(f"sqlite:///{folder.name}/loramux.db")
    return folder


def migrate(url: str) -> None:
    """Bring the database to the current schema, and leave it."""
    database = Database(url)
    database.upgrade()
    database.close()
