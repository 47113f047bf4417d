"""Calls replicas through a deployment handle of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve

from loramux.platform.cluster.ray_connection import DEPLOYMENT
from loramux.platform.cluster.replica_calls import ListedReplica, NoteReplicas
from loramux.platform.cluster.router_hub import HUBS, RouterHub


class RayCalls:
    """Implements ReplicaCalls. The replica's identifier travels in the handle's option `session_id`.

    The option `multiplexed_model_id` would be wrong: Ray Serve answers calls with the same value in any order.
    """

    def __init__(self, app: str) -> None:
        self._app = app
        self._hub = HUBS.setdefault(app, RouterHub())
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._handle: Any = serve.get_deployment_handle(DEPLOYMENT, app)

    @property
    def trouble(self) -> None:
        """Always None: if Ray loses the cluster, it ends this process."""

    def watch(self, note: NoteReplicas) -> None:
        loop = asyncio.get_running_loop()

        def pass_on(replicas: tuple[ListedReplica, ...]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(note, replicas)

        self._hub.watchers.append(pass_on)
        if self._hub.last is not None:
            pass_on(self._hub.last)
        # Setting an option makes the handle ask Ray Serve for the replicas.
        self._handle.options(method_name="send")

    def keep(self, replica_ids: frozenset[str]) -> None:
        self._hub.kept = {**self._hub.kept, id(self): replica_ids}

    async def session(self, replica_id: str, session_id: str) -> AsyncGenerator[bytes, None]:
        handle = self._handle.options(method_name="session", session_id=replica_id, stream=True)
        answers = handle.remote(session_id)
        try:
            async for data in answers:
                yield data
        finally:
            answers.cancel()

    async def send(self, replica_id: str, session_id: str, offset: int, data: bytes) -> None:
        await self._handle.options(method_name="send", session_id=replica_id).remote(session_id, offset, data)
