"""Batches in the database, without a server that runs them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert

from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import batches


def add_batch(database: Database, tenant_id: str, key_id: str, **changes: Any) -> str:
    """Add a batch with 3 of 12 requests answered, and return its identifier."""
    values = {
        "id": new_id("bat"),
        "tenant_id": tenant_id,
        "api_key_id": key_id,
        "endpoint": "/v1/chat/completions",
        "input_file_id": new_id("fil"),
        "labels": {},
        "state": "in_progress",
        "errors": [],
        "num_lines": 12,
        "num_completed": 2,
        "num_failed": 1,
        "created_us": 1_000_000,
        "expires_us": 2_000_000,
        **changes,
    }
    with database.write() as connection:
        connection.execute(insert(batches).values(**values))
    return str(values["id"])
