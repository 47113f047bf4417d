"""Registry rows of a large company: tenants, adapters, versions, aliases and grants."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Table, insert

from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import (
    adapter_alias_history,
    adapter_alias_targets,
    adapter_aliases,
    adapter_grants,
    adapter_versions,
    adapters,
    tenants,
)

ROWS_AT_ONCE = 2000


@dataclass(frozen=True, slots=True)
class World:
    """How many rows of each kind to create. Adapter `a` of tenant `t` is named `tenant-t/adapter-a`."""

    num_tenants: int
    adapters_each: int
    versions_each: int

    @property
    def document(self) -> dict[str, int]:
        return {"tenants": self.num_tenants, "adapters": self.num_adapters, "versions": self.num_versions}

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self.document.items())

    @property
    def num_adapters(self) -> int:
        return self.num_tenants * self.adapters_each

    @property
    def num_versions(self) -> int:
        return self.num_adapters * self.versions_each

    def default(self, tenant: int, adapter: int) -> int:
        """The main version of the default alias. Every tenth alias also has a canary."""
        return 1 + (tenant + adapter) % self.versions_each

    def canary(self, tenant: int, adapter: int) -> int | None:
        return None if (tenant + adapter) % 10 else 1 + self.default(tenant, adapter) % self.versions_each

    def grantee(self, tenant: int, adapter: int) -> int | None:
        """The tenant that the adapter is granted to. Adapter 0 of each tenant is granted to the next tenant, the others
        to none.
        """
        return (tenant + 1) % self.num_tenants if adapter == 0 else None


def digest_of(tenant: int, adapter: int, number: int) -> str:
    return hashlib.sha256(f"{tenant}/{adapter}@{number}".encode()).hexdigest()


def add_world(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--adapters-each", type=int, default=10, help="adapters per tenant")
    parser.add_argument("--versions-each", type=int, default=10, help="versions per adapter")


def world_of(arguments: argparse.Namespace) -> World:
    return World(arguments.tenants, arguments.adapters_each, arguments.versions_each)


@dataclass(frozen=True, slots=True)
class Filled:
    tenant_ids: Sequence[str]
    adapter_ids: Sequence[Sequence[str]]


def fill(database: Database, world: World) -> Filled:
    tenant_ids = [new_id("ten") for _ in range(world.num_tenants)]
    adapter_ids = [[new_id("ada") for _ in range(world.adapters_each)] for _ in range(world.num_tenants)]
    _insert(database, tenants, (_tenant(index, tenant_id) for index, tenant_id in enumerate(tenant_ids)))
    _insert(
        database,
        adapters,
        (
            {"id": adapter_id, "tenant_id": tenant_ids[t], "name": f"adapter-{a}", "created_us": 1}
            for t, row in enumerate(adapter_ids)
            for a, adapter_id in enumerate(row)
        ),
    )
    version_ids = {}
    for t, row in enumerate(adapter_ids):
        for a in range(len(row)):
            for number in range(1, world.versions_each + 1):
                version_ids[t, a, number] = new_id("adv")
    _insert(
        database,
        adapter_versions,
        (_version(adapter_ids[t][a], version_id, t, a, n) for (t, a, n), version_id in version_ids.items()),
    )
    places = [(t, a, adapter_id) for t, row in enumerate(adapter_ids) for a, adapter_id in enumerate(row)]
    _insert(
        database,
        adapter_aliases,
        ({"adapter_id": adapter_id, "name": "default", "revision": 1, "updated_us": 1} for _, _, adapter_id in places),
    )
    targets = [
        {"adapter_id": adapter_id, "name": "default", "version_id": version_ids[t, a, number], "weight": weight}
        for t, a, adapter_id in places
        for number, weight in ((world.default(t, a), 90), (world.canary(t, a), 10))
        if number is not None
    ]
    _insert(database, adapter_alias_targets, iter(targets))
    _insert(
        database,
        adapter_alias_history,
        (
            {
                "id": new_id("alh"),
                "adapter_id": adapter_id,
                "name": "default",
                "revision": 1,
                "actor": "system",
                "action": "set",
                "targets": [],
                "created_us": 1,
            }
            for _, _, adapter_id in places
        ),
    )
    _insert(
        database,
        adapter_grants,
        (
            {"adapter_id": adapter_id, "tenant_id": tenant_ids[grantee], "created_us": 1}
            for t, a, adapter_id in places
            if (grantee := world.grantee(t, a)) is not None
        ),
    )
    return Filled(tenant_ids, adapter_ids)


def _tenant(index: int, tenant_id: str) -> dict[str, Any]:
    slug = f"tenant-{index}"
    return {
        "id": tenant_id,
        "slug": slug,
        "display_name": slug,
        "state": "active",
        "weight": 1,
        "isolation_secret": bytes(32),
        "created_us": 1,
    }


def key_row(key_id: str, tenant_id: str, name: str, public_id: str) -> dict[str, Any]:
    return {
        "id": key_id,
        "tenant_id": tenant_id,
        "public_id": public_id,
        "secret_sha256": bytes(32),
        "name": name,
        "scopes": ["adapters", "base"],
        "created_us": 1,
    }


def _version(adapter_id: str, version_id: str, tenant: int, adapter: int, number: int) -> dict[str, Any]:
    return {
        "id": version_id,
        "adapter_id": adapter_id,
        "number": number,
        "state": "ready",
        "digest": digest_of(tenant, adapter, number),
        "max_rank": 16,
        "num_pages": 20,
        "canonical_bytes": 1 << 20,
        "upload_id": new_id("upl"),
        "report": {"max_rank": 16, "dtypes": ["BF16"]},
        "created_us": 1,
        "ready_us": 1,
    }


def _insert(database: Database, table: Table, rows: Iterator[dict[str, Any]]) -> None:
    waiting: list[dict[str, Any]] = []
    with database.write() as connection:
        for row in rows:
            waiting.append(row)
            if len(waiting) == ROWS_AT_ONCE:
                connection.execute(insert(table), waiting)
                waiting = []
        if waiting:
            connection.execute(insert(table), waiting)
