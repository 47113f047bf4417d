"""Client of an engine that another process on this machine supervises."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from loramux.engine.messages import Add
from loramux.platform.engine_link.connected_engine import ConnectedEngine
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_connection import EngineConnection
from loramux.platform.engine_link.engine_socket import MAX_SOCKET_PATH

log = structlog.get_logger()


class JoinRefused(Exception):
    """The engine cannot be joined. The message says why and how to fix it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    answer_timeout_s: float = 5.0
    first_delay_s: float = 0.1
    max_delay_s: float = 2.0


class JoinedEngine(ConnectedEngine):
    """A client of the engine at `path`, which it neither starts nor stops.

    When the engine stops, open streams end as in the supervisor's gateway, and the client joins the next engine that
    listens at the path. The engine must run the same version of loramux and the model with the given `model_sha256`.
    """

    def __init__(
        self,
        path: Path,
        model_sha256: str,
        joining: Joining | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(CrashStrikes(clock))
        self._path = path
        self._model_sha256 = model_sha256
        self._joining = joining if joining is not None else Joining()
        self._lost: dict[str, Add] = {}
        self._trouble: str | None = None
        self._follower: asyncio.Task[None] | None = None

    @property
    def is_live(self) -> bool:
        """Always true, because the engine's supervisor watches for hangs."""
        return True

    @property
    def trouble(self) -> str | None:
        return None if self.is_ready else self._trouble

    async def start(self) -> None:
        """Join the engine. Raises JoinRefused if there is no engine or it is the wrong one."""
        self._connection = await self._join()
        self._follower = asyncio.create_task(self._follow(), name="engine-follower")

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
        self._leave()

    async def _join(self) -> EngineConnection:
        await asyncio.to_thread(_check_listening, self._path)
        try:
            connection = await EngineConnection.open(self._path, self._note_end, self._joining.answer_timeout_s)
        except EngineUnavailable as error:
            raise JoinRefused(f"{error} ({self._path})") from error
        if connection.info.model_sha256 != self._model_sha256:
            connection.close(frozenset())
            raise JoinRefused(
                f"the engine at {self._path} serves another model: pass the --model directory that its server uses"
            )
        return connection

    async def _follow(self) -> None:
        """Loop forever: wait until the engine is lost, end its streams, and join the next engine."""
        while True:
            assert self._connection is not None
            await self._connection.wait_lost()
            self._trouble = "the engine is gone; the server that started it may be restarting it"
            log.error("engine lost", path=str(self._path))
            self._lost = self._connection.open_adds
            self._leave()
            self._connection = await self._rejoin()
            # Only the supervisor knows which sequences were running when an engine died. The next engine reports them.
            ran = self._connection.info.ran_at_death
            self._strikes.strike([self._lost[name] for name in ran if name in self._lost])
            self._lost = {}
            log.info("engine joined again", path=str(self._path))

    async def _rejoin(self) -> EngineConnection:
        delay_s = self._joining.first_delay_s
        while True:
            await asyncio.sleep(delay_s)
            try:
                return await self._join()
            except Exception as error:
                # Retry after any failure.
                self._trouble = str(error)
            delay_s = min(2 * delay_s, self._joining.max_delay_s)

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(frozenset())


def _check_listening(path: Path) -> None:
    """Raise JoinRefused unless a process listens at the path. ZeroMQ itself would wait forever."""
    if len(str(path).encode()) > MAX_SOCKET_PATH:
        raise JoinRefused(f"{path} is too long for a Unix socket's path: {MAX_SOCKET_PATH} bytes at most")
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise JoinRefused(f"{path} is not a socket: set --engine to the path that 'loramux serve' prints")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(2.0)
            probe.connect(str(path))
    except FileNotFoundError:
        raise JoinRefused(
            f"there is no engine at {path}: set --engine to the path that 'loramux serve' prints"
        ) from None
    except ConnectionRefusedError:
        raise JoinRefused(f"the engine at {path} is gone: start its server, 'loramux serve', first") from None
    except PermissionError:
        raise JoinRefused(
            f"this user is not allowed to use the engine at {path}: run the gateway as the same user as its server"
        ) from None
    except OSError as error:
        raise JoinRefused(f"the engine at {path} cannot be reached: {error.strerror or error}") from None
