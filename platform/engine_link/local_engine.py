"""Supervisor and client of an engine process on this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.messages import Add
from loramux.platform.engine_link.connected_engine import ConnectedEngine
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_connection import EngineConnection
from loramux.platform.engine_link.engine_process import ENGINE_COMMAND, EngineProcess
from loramux.platform.engine_link.engine_socket import EngineSocketDirectory, SocketUnusable
from loramux.platform.engine_link.output_lines import OutputLines
from loramux.platform.engine_link.watchdog import Watchdog

END_GRACE_S = 1.0
"""Time, in seconds, that an engine gets to finish its step when asked to end. Its streams have already ended."""

CONNECT_POLL_S = 0.02

log = structlog.get_logger()


class EngineStartError(Exception):
    """The engine cannot start. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    step_timeout_s: float = 60.0
    """Maximum duration of a step, in seconds. An engine that takes longer counts as hung."""
    start_timeout_s: float = 1800.0
    """Maximum startup time, in seconds. The model can be large, and the first start on a machine compiles kernels."""
    first_delay_s: float = 0.2
    """Delay before a restart after a steady run, in seconds. It doubles after each run that is not steady."""
    max_delay_s: float = 30.0
    steady_s: float = 60.0
    """A run counts as steady if the engine is healthy for more than this many seconds."""

    @property
    def look_interval_s(self) -> float:
        return min(1.0, self.step_timeout_s / 4)

    def delay_s(self, num_short_runs: int) -> float:
        """Delay, in seconds, after `num_short_runs` consecutive runs that were not steady."""
        # Cap the exponent, so that the power cannot overflow.
        return float(min(self.max_delay_s, self.first_delay_s * 2 ** min(num_short_runs, 32)))


class LocalEngine(ConnectedEngine):
    """Starts an engine process, restarts it when it dies or hangs, and sends it requests.

    While no engine is running, `submit` raises EngineUnavailable and `is_ready` is false. When the engine dies, open
    streams end with Finished(reason="error", code="engine_unavailable"). If the engine dies twice while running a
    request, retries of the request end with the code `request_excluded` for a while.

    Other gateways can use the engine through `socket_path`, which is in `socket_directory` if that directory can hold a
    socket. The engine's output goes to `lines`, or unchanged to standard error.

    If a server has several engines, `name` tells them apart in the log, and they share `strikes`.
    """

    def __init__(
        self,
        config: EngineConfig,
        supervision: Supervision | None = None,
        command: tuple[str, ...] = ENGINE_COMMAND,
        clock: Callable[[], float] = time.monotonic,
        socket_directory: Path | None = None,
        lines: OutputLines | None = None,
        name: str | None = None,
        strikes: CrashStrikes | None = None,
    ) -> None:
        super().__init__(strikes if strikes is not None else CrashStrikes(clock))
        self._config = config
        self._supervision = supervision if supervision is not None else Supervision()
        self._command = command
        self._clock = clock
        self._lines = lines
        self._log = log if name is None else log.bind(engine=name)
        try:
            self._socket = EngineSocketDirectory(socket_directory)
        except SocketUnusable as error:
            raise EngineStartError(str(error)) from error
        self.ran_at_death: frozenset[str] = frozenset()
        """IDs of all gateways' sequences that the last engine was running when it died.

        Set before `is_ready` becomes false.
        """
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._is_hung = False
        self._trouble: str | None = None

    @property
    def is_live(self) -> bool:
        """False from the time a step hangs until the process is gone, or forever if it cannot be killed."""
        return not self._is_hung

    @property
    def trouble(self) -> str | None:
        """Why the engine is not ready, in one line for operators: the last engine's exit status and final line of
        output.
        """
        return None if self.is_ready else self._trouble

    @property
    def socket_path(self) -> Path:
        """The path where the engine listens for all gateways. It stays the same across restarts."""
        return self._socket.path

    @property
    def pid(self) -> int | None:
        """The running engine's process id."""
        return None if self._process is None else self._process.pid

    async def spawn(self) -> None:
        """Launch the engine without waiting until it is ready, so the caller can import modules meanwhile. `start`
        waits.
        """
        if self._process is None:
            await self._launch()

    async def start(self) -> None:
        """Wait until the engine can run sequences. Raises EngineStartError with the reason if it cannot."""
        await self.spawn()
        try:
            await self._connect()
        except (EngineStartError, EngineUnavailable) as error:
            await self.close()
            raise EngineStartError(str(error)) from error
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def close(self) -> None:
        """Stop supervising, end the process and remove its socket.

        This takes at most a few seconds, even if the process hangs.
        """
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        # An engine that is still loading does not read messages, and killing it loses nothing.
        grace_s = END_GRACE_S if self.is_ready and not self._is_hung else 0.0
        self._disconnect(frozenset())
        process, self._process = self._process, None
        if process is not None:
            await process.end(grace_s)
        self._socket.close()

    async def _launch(self) -> None:
        self.socket_path.unlink(missing_ok=True)
        config = msgspec.structs.replace(self._config, ran_at_death=tuple(sorted(self.ran_at_death)))
        self._process = await EngineProcess.launch(self._command, config, self.socket_path, self._lines)

    async def _connect(self) -> None:
        process = self._process
        assert process is not None
        timeout_s = self._supervision.start_timeout_s
        deadline = self._clock() + timeout_s
        while not self.socket_path.exists():
            if process.exit_code is not None:
                raise EngineStartError(f"the engine did not start: {process.last_line() or process.how_it_ended()}")
            if self._clock() > deadline:
                raise EngineStartError(f"the engine was not ready within {timeout_s:.0f} s")
            await asyncio.sleep(CONNECT_POLL_S)
        opening = asyncio.ensure_future(EngineConnection.open(self.socket_path, self._note_end))
        exited = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait({opening, exited}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                raise EngineStartError(f"the engine did not start: {process.how_it_ended()}")
            self._connection = opening.result()
        finally:
            opening.cancel()
            exited.cancel()
        self._trouble = None

    def _disconnect(self, running: frozenset[str]) -> list[Add]:
        """End every stream. Return the Add messages of unfinished sequences in `running`."""
        connection, self._connection = self._connection, None
        return [] if connection is None else connection.close(running)

    async def _supervise(self) -> None:
        """Loop forever: wait for the engine to die, end its streams, and restart it."""
        num_short_runs = 0
        while True:
            assert self._process is not None
            worked_s = await self._until_death(self._process)
            if worked_s > self._supervision.steady_s:
                num_short_runs = 0
            delay_s = self._supervision.delay_s(num_short_runs)
            num_short_runs += 1
            self._log.error("engine died", reason=self._trouble, restart_in_s=delay_s)
            self._process.close()
            await asyncio.sleep(delay_s)
            try:
                await self._launch()
                await self._connect()
                self._log.info("engine restarted", pid=self.pid)
            except Exception as error:
                # Retry in the next iteration after any failure. First kill the process, which may be running but
                # unreachable.
                self._log.error("engine restart failed", reason=str(error))
                self._process.kill()

    async def _until_death(self, process: EngineProcess) -> float:
        """Wait until the process is gone, killing it if its loop hangs. Return how many seconds it was healthy."""
        limits = self._supervision
        interval_s = limits.look_interval_s
        watchdog = Watchdog(limits.step_timeout_s, max_gap_s=2 * interval_s)
        started = looked = self._clock()
        exited = asyncio.ensure_future(process.wait())
        try:
            while not (await asyncio.wait({exited}, timeout=interval_s))[0]:
                now = self._clock()
                if self.is_ready and watchdog.look(process.record.num_passes(), now - looked):
                    self._is_hung = True
                    self._log.error("engine hangs", pid=process.pid, stalled_s=round(watchdog.stalled_s, 1))
                    self._abandon_process(process)
                    process.kill()
                looked = now
        finally:
            exited.cancel()
        self._abandon_process(process)
        self._trouble = process.how_it_ended()
        if self._is_hung:
            self._trouble = f"it made no progress for {watchdog.stalled_s:.0f} s; {self._trouble}"
            self._is_hung = False
        return self._clock() - started - watchdog.stalled_s

    def _abandon_process(self, process: EngineProcess) -> None:
        """End the streams of a dead or hung engine, and record strikes against the requests that it was running."""
        if self.is_ready:
            self.ran_at_death = process.record.running()
            self._strikes.strike(self._disconnect(self.ran_at_death))
