"""Starts and ends one engine process, and collects its output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec
import structlog

from loramux.engine.device.cuda_driver import VISIBLE_GPUS, visible_gpus
from loramux.engine.loop.config import EngineConfig
from loramux.engine.server.step_record import StepRecord
from loramux.platform.engine_link.output_lines import OutputLines
from loramux.platform.engine_link.process_output import ProcessOutput

ENGINE_COMMAND = (sys.executable, "-m", "loramux.engine.server.process")
"""The engine's command line, without the socket's path and the step record's file descriptor, which are appended."""

KILL_WAIT_S = 2.0
"""How long to wait for a killed process to exit, in seconds. A process stuck in a kernel driver may never exit."""

THREADS_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
"""Makes idle compute threads spin for about 0.2 ms before they sleep (GNU OpenMP).

A step has dozens of parallel regions, less than 0.2 ms apart, and waking a thread takes 0.1 ms. Threads that spin
forever would take CPU time from the gateway, and from each other if there are fewer free cores than threads.
"""

MEMORY_ENVIRONMENT = {
    "GLIBC_TUNABLES": ":".join(
        (
            "glibc.malloc.hugetlb=1",
            f"glibc.malloc.mmap_threshold={32 << 20}",
            f"glibc.malloc.trim_threshold={1 << 30}",
            f"glibc.malloc.top_pad={64 << 20}",
        )
    )
}
"""Lets a step reuse memory that the previous step freed, in huge pages if the kernel offers them (GNU libc).

Otherwise each large step would map memory for its activations again. A step with sixteen prompts of 64 tokens would
cause 20,000 page faults. Reading weights from small pages takes twice as long. 32 MiB is the largest `mmap_threshold`
that the C library accepts.
"""

log = structlog.get_logger()


class EngineProcess:
    """A started engine process. Always call `close`, no matter how the process ended."""

    def __init__(self, process: asyncio.subprocess.Process, record: StepRecord, output: ProcessOutput) -> None:
        self._process = process
        self._output = output
        self.record = record

    @staticmethod
    async def launch(
        command: tuple[str, ...], config: EngineConfig, socket_path: Path, lines: OutputLines | None = None
    ) -> EngineProcess:
        """Start an engine that will listen at `socket_path`. Its output goes to `lines`, or unchanged to stderr."""
        record_fd = StepRecord.new_file(config.max_sequences)
        output = ProcessOutput() if lines is None else ProcessOutput(lines.take, lines.end)
        try:
            record = StepRecord(record_fd)
            process = await asyncio.create_subprocess_exec(
                *command,
                str(socket_path),
                str(record_fd),
                stdin=asyncio.subprocess.PIPE,
                stdout=output.write_fd,
                stderr=output.write_fd,
                pass_fds=(record_fd,),
                # In its own session, the engine does not receive Ctrl-C from the terminal. The supervisor receives it,
                # and drains requests before it stops the engine.
                start_new_session=True,
                env=_environment(config.program_dir, config.gpus),
            )
        except BaseException:
            output.close()
            raise
        finally:
            os.close(record_fd)
        output.close_write_end()
        assert process.stdin is not None
        # Keep standard input open. It closes when this process ends, and then the engine exits. If the engine has died,
        # this write fails, and `wait` reports the death.
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            await process.stdin.drain()
        return EngineProcess(process, record, output)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def how_it_ended(self) -> str:
        """Return the process's exit status and last line of output, in one line."""
        code = self.exit_code
        if code is None:
            end = "it is still running"
        elif code < 0:
            end = f"killed by {_signal_name(-code)}"
        else:
            end = f"exit code {code}"
        line = self._output.last_line()
        return end if line is None else f"{end}: {line}"

    def last_line(self) -> str | None:
        return self._output.last_line()

    def kill(self) -> None:
        if self.exit_code is None:
            self._process.kill()

    async def end(self, grace_s: float) -> None:
        """Ask the process to exit, and kill it if it is still running after `grace_s`. Takes at most KILL_WAIT_S
        longer.
        """
        if self.exit_code is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            if not await self._has_ended_within(grace_s):
                self.kill()
                if not await self._has_ended_within(KILL_WAIT_S):
                    log.error("the engine cannot be killed", pid=self.pid)
        self.close()

    def close(self) -> None:
        self._output.last_line()
        self._output.close()
        self.record.close()

    async def _has_ended_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            return False
        return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _environment(program_dir: str | None = None, gpus: tuple[int, ...] = ()) -> dict[str, str]:
    """Return this process's environment with the engine's own settings, and without the server's.

    The engine gets its configuration from standard input, and needs neither the administrator's key nor the database.
    """
    programs = {} if program_dir is None else {"TRITON_CACHE_DIR": program_dir}
    visible = {VISIBLE_GPUS: visible_gpus(gpus, os.environ)} if gpus else {}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")}
    return {
        **THREADS_ENVIRONMENT,
        **MEMORY_ENVIRONMENT,
        **programs,
        **inherited,
        **visible,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
