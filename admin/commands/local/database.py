"""`loramux db`: the database's schema. These commands connect to the database without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from loramux.admin.commands.options import AsJson, ConfigFile, DatabaseUrl, DataDir
from loramux.admin.commands.output import error_document, fail, tell
from loramux.admin.exit_codes import REFUSED, WRONG_CALL

if TYPE_CHECKING:
    from loramux.migrations.database import Database

app = typer.Typer(no_args_is_help=True, help="Upgrade the database's schema, or check it.")


@app.command()
def upgrade(
    config: ConfigFile = None, data_dir: DataDir = None, database_url: DatabaseUrl = None, as_json: AsJson = False
) -> None:
    """Upgrade the schema to the version that this release of loramux needs."""
    with _database(config, data_dir, database_url, as_json, creates=True) as database:
        database.upgrade()
    _tell_current(as_json)


@app.command()
def check(
    config: ConfigFile = None, data_dir: DataDir = None, database_url: DatabaseUrl = None, as_json: AsJson = False
) -> None:
    """Exit with 0 if the database is reachable and its schema is up to date."""
    with _database(config, data_dir, database_url, as_json, creates=False) as database:
        database.check_schema()
    _tell_current(as_json)


def _tell_current(as_json: bool) -> None:
    tell({"object": "schema", "current": True}, "the schema is up to date", as_json)


@contextmanager
def _database(
    config: Path | None, data_dir: Path | None, database_url: str | None, as_json: bool, *, creates: bool
) -> Iterator[Database]:
    from loramux.admin.server.data_directory import make_private
    from loramux.admin.server.settings import DataSettings, SettingsError, load_settings
    from loramux.migrations.database import Database, DatabaseError, NoDatabase

    overrides = {"config": config, "data_dir": data_dir, "database_url": database_url}
    try:
        settings = load_settings(DataSettings, overrides)
        if settings.is_database_embedded and creates:
            make_private(settings.data_dir)
        database = Database(settings.resolved_database_url)
    except (SettingsError, DatabaseError) as error:
        fail(str(error), WRONG_CALL, error_document(str(error), "wrong_settings") if as_json else None)
    except OSError as error:
        message = f"the data directory {settings.data_dir} cannot be used: {error.strerror}"
        fail(message, WRONG_CALL, error_document(message, "wrong_settings") if as_json else None)
    try:
        yield database
    except NoDatabase as error:
        message = f"{error}: correct --data-dir or --database-url, or run 'loramux db upgrade' to create it"
        fail(message, REFUSED, error_document(message, "no_database") if as_json else None)
    except DatabaseError as error:
        fail(str(error), REFUSED, error_document(str(error), "wrong_schema") if as_json else None)
    finally:
        database.close()
