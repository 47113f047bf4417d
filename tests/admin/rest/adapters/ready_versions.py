from __future__ import annotations

from sqlalchemy import insert

from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import adapter_versions


def add_ready_versions(database: Database, adapter_id: str, count: int, *, is_new: bool = False) -> None:
    """The first version is the default. The versions are old unless `is_new`."""
    with database.write() as connection:
        for number in range(1, count + 1):
            connection.execute(
                insert(adapter_versions).values(
                    id=new_id("adv"),
                    adapter_id=adapter_id,
                    number=number,
                    state="ready",
                    digest=f"{number:x}" * 64,
                    max_rank=8,
                    num_pages=1,
                    canonical_bytes=1,
                    upload_id=new_id("upl"),
                    report={"max_rank": 8},
                    created_us=database.now_us(connection) if is_new else 0,
                    ready_us=0,
                )
            )
    AdapterAliases(database).set(adapter_id, "default", {1: 100})
