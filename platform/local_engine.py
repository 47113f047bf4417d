"""A supervised engine process on this machine, and the client that talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import structlog

from loramux.engine.config import EngineConfig
from loramux.engine.messages import AdapterState, Add, EngineReady, Finished, SequenceOutput, Stats
from loramux.platform.engine_client import EngineUnavailable
from loramux.platform.engine_connection import EngineConnection

EXIT_REFUSED = 3
"""What `loramux.engine.process` exits with when a restart would not help."""

MAX_SOCKET_PATH = 107
"""Bytes of a unix socket's path (Linux, sun_path)."""

START_TIMEOUT_S = 300.0
RESTART_DELAYS_S = (0.2, 1.0, 5.0, 15.0)
"""Waits before consecutive restarts; a run longer than `STEADY_S` begins again at the first."""
STEADY_S = 60.0

log = structlog.get_logger()


class EngineStartError(Exception):
    """The engine cannot start; its own sentence says why."""


class LocalEngine:
    """Starts an engine process, starts it again when it dies, and is its client.

    While no engine runs, `submit` raises EngineUnavailable and `is_ready` is false; streams that were running when
    it died end with Finished(reason="error", code="engine_unavailable").
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        # Created 0700 by mkdtemp: nobody else can reach the socket inside.
        self._directory = Path(tempfile.mkdtemp(prefix="loramux-"))
        self._socket_path = self._directory / "engine.sock"
        if len(os.fsencode(self._socket_path)) > MAX_SOCKET_PATH:
            raise EngineStartError(f"the temporary directory's path is too long for a unix socket: {self._directory}")
        self._process: asyncio.subprocess.Process | None = None
        self._connection: EngineConnection | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._is_closing = False

    @property
    def info(self) -> EngineReady | None:
        return None if self._connection is None else self._connection.info

    @property
    def is_ready(self) -> bool:
        return self._connection is not None

    @property
    def pid(self) -> int | None:
        """The running engine's process id."""
        return None if self._process is None else self._process.pid

    async def spawn(self) -> None:
        """Begin to start the engine and return; `start` waits for it. Lets the caller import while the engine loads."""
        if self._process is None:
            self._process = await self._launch()

    async def start(self) -> None:
        """Wait until the engine can run sequences; raises EngineStartError with its reason when it cannot."""
        await self.spawn()
        try:
            await self._connect()
        except (EngineStartError, EngineUnavailable) as error:
            await self.close()
            raise EngineStartError(str(error)) from error
        self._supervision = asyncio.create_task(self._supervise(), name="engine-supervisor")

    def submit(self, add: Add) -> AsyncIterator[SequenceOutput | Finished]:
        return self._connected().submit(add)

    def abort(self, sequence_id: str, keep: int | None = None) -> None:
        if self._connection is not None:
            self._connection.abort(sequence_id, keep)

    async def load(self, digest: str, timeout_s: float) -> AdapterState:
        return await self._connected().load(digest, timeout_s)

    async def unload(self, digest: str, timeout_s: float) -> AdapterState:
        return await self._connected().unload(digest, timeout_s)

    async def stats(self, timeout_s: float) -> Stats:
        return await self._connected().stats(timeout_s)

    async def close(self) -> None:
        """Stop supervising, end the process and remove its socket."""
        self._is_closing = True
        if self._supervision is not None:
            self._supervision.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervision
        is_connected = self.is_ready
        self._disconnect()
        await self._end_process(is_connected)
        self._socket_path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._directory.rmdir()

    def _connected(self) -> EngineConnection:
        if self._connection is None:
            raise EngineUnavailable("the engine is not running")
        return self._connection

    async def _launch(self) -> asyncio.subprocess.Process:
        self._socket_path.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "loramux.engine.process",
            str(self._socket_path),
            stdin=asyncio.subprocess.PIPE,
            stderr=None,
            # A session of its own: Ctrl-C at the terminal is for the supervisor, which drains first.
            start_new_session=True,
            env=_engine_environment(),
        )
        assert process.stdin is not None
        # Standard input stays open: the engine ends when this process does.
        process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        await process.stdin.drain()
        return process

    async def _connect(self) -> None:
        """Connect to the launched process once it listens."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._socket_path.exists():
            if self._process.returncode is not None:
                reason = "its message is above" if self._process.returncode == EXIT_REFUSED else "see its output above"
                raise EngineStartError(f"the engine did not start ({reason})")
            if time.monotonic() > deadline:
                raise EngineStartError(f"the engine was not ready within {START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.02)
        self._connection = await EngineConnection.open(self._socket_path)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _supervise(self) -> None:
        """Wait for the engine's death, end what ran on it, and start it again; forever."""
        attempt = 0
        while not self._is_closing:
            assert self._process is not None
            started = time.monotonic()
            code = await self._process.wait()
            self._disconnect()
            if time.monotonic() - started > STEADY_S:
                attempt = 0
            delay = RESTART_DELAYS_S[min(attempt, len(RESTART_DELAYS_S) - 1)]
            attempt += 1
            log.error("engine died", exit_code=code, restart_in_s=delay)
            await asyncio.sleep(delay)
            try:
                self._process = await self._launch()
                await self._connect()
                log.info("engine restarted", pid=self._process.pid)
            except Exception as error:
                # Whatever it was, the next round tries again; a process that cannot be reached is of no use.
                log.error("engine restart failed", reason=str(error))
                if self._process.returncode is None:
                    self._process.kill()

    async def _end_process(self, is_connected: bool) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        if not is_connected:
            # It is still loading and would not notice; it holds nothing that could be lost.
            process.kill()
        try:
            await asyncio.wait_for(process.wait(), timeout=5.0)
        except TimeoutError:
            process.kill()
            await process.wait()


def _engine_environment() -> dict[str, str]:
    # Idle threads that spin would take the cores from the gateway and the kernel's other threads beside them: with a
    # busy neighbour, a parallel region then waits for a time slice.
    return {
        "OMP_WAIT_POLICY": "passive",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
