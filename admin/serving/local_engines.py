"""Servers with several engines on their own machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path

import structlog

from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.settings import Settings
from loramux.admin.serving.chosen_router import router_factory
from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.messages import EngineReady
from loramux.migrations.database import Database
from loramux.platform.base_draw import BaseDraw
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.engine_link.engine_socket import EngineSocketDirectory, SocketUnusable
from loramux.platform.engine_link.local_engine import EngineStartError, LocalEngine, Supervision
from loramux.platform.engine_link.output_lines import OutputLines
from loramux.platform.replicas.data_parallel import DataParallelEngines, engine_name
from loramux.platform.replicas.engine_front import EngineFront
from loramux.platform.replicas.routed_engine import RoutedEngine
from loramux.platform.telemetry.package_metrics import ReplicaMetrics

log = structlog.get_logger()


def open_several(engines: Mapping[str, EngineClient], router: str) -> DataParallelEngines:
    """Put engines behind one client. Raises StartRefused if the router cannot be used."""
    return DataParallelEngines(engines, router_factory(router))


class LocalEngines:
    """Takes the place of LocalEngine in a server with several engines, which it starts and supervises.

    The engines share `strikes`. With `is_shared`, `front` is where other servers reach the engines.

    Raises StartRefused if the router cannot be used, and EngineStartError if an engine's socket cannot.
    """

    def __init__(
        self,
        settings: Settings,
        directory: DataDirectory,
        configs: Sequence[EngineConfig],
        supervision: Supervision,
        command: tuple[str, ...],
        strikes: CrashStrikes,
        is_shared: bool = False,
    ) -> None:
        with suppress(OSError):
            # The engines' sockets are in directories below it, or in temporary ones if it cannot be created.
            directory.run.mkdir(mode=0o700, exist_ok=True)
        self._engines = {
            name: LocalEngine(
                config,
                supervision,
                command,
                socket_directory=directory.engine_run(name),
                lines=OutputLines("engine printed", log.bind(engine=name)) if settings.log_format == "json" else None,
                name=name,
                strikes=strikes,
            )
            for name, config in ((engine_name(number), config) for number, config in enumerate(configs))
        }
        self.engines = open_several(self._engines, settings.router)
        self.front = self._new_front(directory) if is_shared else None
        every = list(self._engines.items())
        # Otherwise, all engines would compile the same programs at the same time.
        self._waves = (every[:1], every[1:]) if _has_to_compile(configs[0]) else (every,)

    @property
    def info(self) -> EngineReady | None:
        return self.engines.info

    @property
    def client(self) -> RoutedEngine:
        return self.engines.engine

    @property
    def place(self) -> str:
        """The line with which a starting server names the sockets of its engines."""
        sockets = ",".join(str(engine.socket_path) for engine in self._engines.values())
        return f"engines     {sockets}  (for additional gateways: loramux gateway --engine)"

    def share(
        self, database: Database, metrics: ReplicaMetrics, executor: Executor, draw: BaseDraw
    ) -> DataParallelEngines:
        """Implements OpenSharing."""
        return self.engines

    async def spawn(self) -> None:
        """Launch the engines without waiting until they are ready.

        If programs for GPUs have to be compiled, only the first engine is launched. `start` launches the others when
        it is ready.
        """
        await asyncio.gather(*(engine.spawn() for _, engine in self._waves[0]))

    async def start(self) -> None:
        """Wait until all engines are ready. Raises EngineStartError with the reason if one cannot start."""
        for wave in self._waves:
            await asyncio.gather(*(self._start(name, engine) for name, engine in wave))
        await self.engines.follow()
        if self.front is not None:
            self.front.open()

    async def close(self) -> None:
        if self.front is not None:
            await self.front.close()
        await self.engines.close()

    def _new_front(self, directory: DataDirectory) -> EngineFront:
        try:
            return EngineFront(self.client, EngineSocketDirectory(directory.run))
        except SocketUnusable as error:
            raise EngineStartError(str(error)) from error

    async def _start(self, name: str, engine: LocalEngine) -> None:
        try:
            await engine.start()
        except EngineStartError as error:
            raise EngineStartError(f"{name}: {error}") from error


def _has_to_compile(config: EngineConfig) -> bool:
    """Return whether this is a first start on a GPU, before which there are no compiled programs."""
    if config.device != "cuda":
        return False
    directory = os.environ.get("TRITON_CACHE_DIR", config.program_dir)
    return directory is None or not any(Path(directory).glob("*"))
