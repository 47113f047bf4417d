"""Servers whose engines run in a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from loramux.adapter_store.sandbox.confinement import hide_memory
from loramux.admin.errors import StartRefused
from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.local_cluster import LocalCluster
from loramux.admin.server.settings import LOCAL_CLUSTER, ClusterSettings, Settings
from loramux.admin.serving.chosen_router import router_factory
from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.messages import EngineReady
from loramux.migrations.database import Database
from loramux.platform.base_draw import BaseDraw
from loramux.platform.cluster.cluster_fleet import NO_REPLICA, ClusterFleet
from loramux.platform.cluster.cluster_link import ClusterLink, LinkTarget
from loramux.platform.cluster.ray_connection import APP, LOOPBACK_ONLY, ClusterUnavailable, check_ray
from loramux.platform.engine_link.local_engine import EngineStartError
from loramux.platform.replicas.engine_group import EngineGroup
from loramux.platform.telemetry.package_metrics import ReplicaMetrics

REPLICA_WAIT_S = 60.0
"""How long a starting gateway waits for a replica, in seconds."""


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """The address of a cluster's head, and the environment that Ray needs to join it."""

    address: str
    environment: Mapping[str, str]

    @staticmethod
    def of(settings: Settings | ClusterSettings) -> ClusterPlace:
        """Raises StartRefused if the setting `cluster` is `local` and no local cluster runs."""
        assert settings.cluster is not None
        if settings.cluster != LOCAL_CLUSTER:
            is_here = settings.cluster.startswith(("127.", "localhost:"))
            return ClusterPlace(settings.cluster, LOOPBACK_ONLY if is_here else {})
        local = LocalCluster(DataDirectory(settings.data_dir).cluster)
        head = local.head()
        if head is None:
            raise StartRefused(
                f"no cluster with the data directory {settings.data_dir} runs: start it with 'loramux cluster up'"
            )
        return ClusterPlace(head.address, local.environment)


class ClusterMember:
    """Takes the place of LocalEngine in a server whose engines run in a cluster: it joins the cluster and waits for a
    replica. It never stops one.
    """

    def __init__(self, settings: Settings, config: EngineConfig) -> None:
        self.client = EngineGroup(NO_REPLICA)
        self.address = ClusterPlace.of(settings).address
        self._settings = settings
        self._link = ClusterLink(self._target)
        self._config = config
        self._router = settings.router
        self._fleet: ClusterFleet | None = None

    @property
    def info(self) -> EngineReady | None:
        return self.client.info

    @property
    def place(self) -> str:
        """The line with which a starting server names the cluster."""
        return f"cluster     {self.address}  (its replicas: loramux replicas)"

    async def spawn(self) -> None:
        """Join the cluster. Raises EngineStartError.

        The link process runs code that Ray's other processes send it, so this process's secrets are hidden from it.
        """
        hide_memory()
        try:
            check_ray()
            await self._link.start()
        except ClusterUnavailable as error:
            raise EngineStartError(str(error)) from error

    def share(self, database: Database, metrics: ReplicaMetrics, executor: Executor, draw: BaseDraw) -> ClusterFleet:
        """Implements OpenSharing."""
        self._fleet = ClusterFleet(self._link, self.client, router_factory(self._router), draw, metrics)
        return self._fleet

    async def start(self) -> None:
        """Wait until a replica is ready. Raises EngineStartError, which says why none is."""
        assert self._fleet is not None
        self._fleet.follow()
        try:
            async with asyncio.timeout(REPLICA_WAIT_S):
                await self.client.shown()
        except TimeoutError:
            raise EngineStartError(self.client.trouble or NO_REPLICA) from None
        assert self.info is not None
        own = self._config
        if self.info.dtype != own.dtype:
            raise EngineStartError(
                f"the replicas compute in {self.info.dtype}, but this server packs adapters in {own.dtype}: "
                f"set --dtype {self.info.dtype}"
            )
        for name, theirs, ours in (
            ("adapter_dtype", self.info.adapter_dtype, own.adapter_dtype),
            ("kv_dtype", self.info.kv_dtype, own.kv_dtype),
        ):
            if theirs != ours:
                raise EngineStartError(
                    f"the replicas have {name} {theirs or 'unset'}, but this server packs adapters for "
                    f"{ours or 'unset'}: use the same setting"
                )

    async def close(self) -> None:
        """End the streams, and leave the cluster."""
        if self._fleet is not None:
            await self._fleet.close()
        await self._link.close()

    def _target(self) -> LinkTarget:
        place = ClusterPlace.of(self._settings)
        return LinkTarget(address=place.address, app=APP, environment=place.environment)
