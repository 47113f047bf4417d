"""A gateway as a deployment of Ray Serve, behind its proxy."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI

from loramux.admin.server.data_directory import open_data_directory
from loramux.admin.server.settings import Settings, load_settings
from loramux.admin.serving.assembly import assemble
from loramux.admin.serving.chosen_router import router_factory
from loramux.admin.serving.serve import read_model
from loramux.migrations.database import Database
from loramux.platform.base_draw import BaseDraw
from loramux.platform.cluster.cluster_fleet import NO_REPLICA, ClusterFleet
from loramux.platform.replicas.engine_group import EngineGroup
from loramux.platform.routing.routers import HOMES
from loramux.platform.telemetry.package_metrics import ReplicaMetrics

PATHS = ("model", "data_dir")


def read_settings(values: dict[str, Any]) -> Settings:
    return load_settings(Settings, {name: Path(value) if name in PATHS else value for name, value in values.items()})


class ServedGateway:
    """Everything of `loramux serve --cluster` except its listeners and its link process, which Ray Serve replaces.

    `document` are the server's settings as JSON. `engines`, the handle of the replicas, ties them to the application.
    """

    async def __init__(self, document: str, engines: object) -> None:  # type: ignore[misc]
        # Ray Serve awaits the constructor. Only a replica can import this module.
        from loramux.platform.cluster.ray_calls import RayCalls
        from loramux.platform.cluster.ray_connection import APP

        settings = read_settings(msgspec.json.decode(document))
        model, config = read_model(settings)
        calls, cluster = RayCalls(APP), EngineGroup(NO_REPLICA)

        def share(database: Database, metrics: ReplicaMetrics, executor: Executor, draw: BaseDraw) -> ClusterFleet:
            return ClusterFleet(calls, cluster, router_factory(HOMES), draw, metrics)

        self._directory = open_data_directory(settings.data_dir)
        self._assembly = assemble(settings, self._directory.__enter__(), model, config, cluster, True, share)
        assembled = await asyncio.to_thread(self._assembly.__enter__)
        assert isinstance(assembled.sharing, ClusterFleet)
        assembled.sharing.follow()
        await cluster.shown()
        self._maintenance = asyncio.create_task(assembled.gateway.run.maintenance.run())
        self._app = assembled.gateway_app

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app
