"""Client of an engine that another process on this machine supervises."""

from __future__ import annotations

import asyncio
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_connection import EngineConnection
from loramux.platform.engine_link.engine_socket import MAX_SOCKET_PATH
from loramux.platform.engine_link.followed_engine import FollowedEngine, Joining, JoinRefused


class JoinedEngine(FollowedEngine):
    """A client of the engine at `path`, which it neither starts nor stops.

    When the engine stops, open streams end with the code `engine_unavailable`, and the client joins the next engine
    that listens at the path. The engine must run the same version of loramux and the model with the given
    `model_sha256`. Later engines must also have the same weights as the first engine. Clients of several engines of one
    server share `strikes`.
    """

    def __init__(
        self,
        path: Path,
        model_sha256: str,
        joining: Joining | None = None,
        clock: Callable[[], float] = time.monotonic,
        strikes: CrashStrikes | None = None,
    ) -> None:
        super().__init__(str(path), joining if joining is not None else Joining(), clock, strikes)
        self._path = path
        self._model_sha256 = model_sha256
        self._base_sha256: str | None = None

    async def start(self) -> None:
        """Join the engine. Raises JoinRefused if there is no engine or it is the wrong one."""
        self._connection = await self._join()
        self.follow()

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
        if self._base_sha256 not in (None, connection.info.base_sha256):
            connection.close(frozenset())
            raise JoinRefused(f"the engine at {self._path} now serves other weights: start this gateway again")
        self._base_sha256 = connection.info.base_sha256
        return connection


def _check_listening(path: Path) -> None:
    """Raise JoinRefused unless a process listens at the path. ZeroMQ itself would keep retrying without reporting an
    error.
    """
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
