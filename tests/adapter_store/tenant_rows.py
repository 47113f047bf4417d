from __future__ import annotations

from sqlalchemy import insert

from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import tenants


def add_tenant(database: Database, slug: str) -> str:
    tenant_id = new_id("ten")
    with database.write() as connection:
        connection.execute(
            insert(tenants).values(
                id=tenant_id,
                slug=slug,
                display_name=slug,
                state="active",
                weight=1,
                isolation_secret=bytes(32),
                created_us=database.now_us(connection),
            )
        )
    return tenant_id
