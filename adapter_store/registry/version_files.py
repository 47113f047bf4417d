"""SQL for the optional files of a version."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, delete, insert, select

from loramux.adapter_store.formats.version_files.further_files import FurtherFiles
from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_version_files

_FILES = adapter_version_files.c


def read_further_files(database: Database, version_id: str) -> Mapping[str, bytes]:
    query = select(_FILES.name, _FILES.content).where(_FILES.version_id == version_id)
    with database.read() as connection:
        return {row.name: bytes(row.content) for row in connection.execute(query)}


def replace_further_files(connection: Connection, version_id: str, files: FurtherFiles) -> None:
    delete_further_files(connection, version_id)
    for name, sha256 in files.checksums.items():
        content = files.contents[name]
        row = {"version_id": version_id, "name": name, "size": len(content), "sha256": sha256, "content": content}
        connection.execute(insert(adapter_version_files).values(row))


def delete_further_files(connection: Connection, version_id: str) -> None:
    connection.execute(delete(adapter_version_files).where(_FILES.version_id == version_id))
