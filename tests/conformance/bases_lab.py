"""Servers of two versions of a base that share requests, each with a paced engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import select

from loramux.adapter_store.registry.bases import Bases, note_validated
from loramux.engine.architectures.model_files import base_sha256
from loramux.migrations import schema
from loramux.platform.accounts.tenants import Tenant
from tests.conformance.fleet_lab import FleetLab
from tests.conformance.gateway_lab import LabGateway

NUM_OLD = 2
"""Number of servers of the old base. One more serves the new one."""


class BasesLab(FleetLab):
    def __init__(self, directory: Path, database_url: str, old: Path, new: Path) -> None:
        self._new_model = new
        self.new_id = base_sha256(new)
        super().__init__(directory, database_url, old, NUM_OLD + 1)

    @property
    def new_server(self) -> LabGateway:
        return self.gateways[NUM_OLD]

    def account(self, slug: str) -> tuple[Tenant, str]:
        """As in other labs. The adapters are valid for both bases."""
        tenant, key = super().account(slug)
        with self.database.write() as connection:
            versions = select(schema.adapter_versions.c.id).join(schema.adapters).filter_by(tenant_id=tenant.id)
            for version_id in connection.execute(versions).scalars().all():
                note_validated(connection, version_id, self.new_id, now_us=0)
        return tenant, key

    def adapter_ids(self, tenant_id: str) -> Mapping[str, str]:
        query = select(schema.adapters.c.id, schema.adapters.c.name).filter_by(tenant_id=tenant_id)
        with self.database.read() as connection:
            return {row.name: row.id for row in connection.execute(query)}

    def divide(self, old: int, new: int) -> Mapping[str, int]:
        weights = {self.base_id: old, self.new_id: new}
        Bases(self.database).set_weights(weights)
        return weights

    def wait_connected(self) -> None:
        """Wait until each server is connected to all others, which is so only while the bases have weights."""
        for gateway in self.gateways:
            super().wait_ready(gateway)

    def wait_ready(self, gateway: LabGateway) -> None:
        self.wait_serving(gateway)

    def ran_on(self) -> Mapping[str, set[str]]:
        """The bases whose engines got a sequence of each request."""
        found: dict[str, set[str]] = {}
        for number, gateway in enumerate(self.gateways):
            base_id = self.base_id if number < NUM_OLD else self.new_id
            for line in self.outputs_of(gateway).read_text().splitlines():
                found.setdefault(line.split()[1].rpartition("-")[0], set()).add(base_id)
        return found

    def _settings(self, number: int) -> dict[str, Any]:
        settings = super()._settings(number)
        return settings if number < NUM_OLD else {**settings, "model": str(self._new_model)}


def make_new_version(folder: Path, base: Path) -> Path:
    """Copy a base with another last weight."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    return folder
