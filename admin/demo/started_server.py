"""Starts the demo's server in a temporary data directory, on free ports, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from loramux.admin.demo.server import DemoFailed, DemoServer
from loramux.admin.exit_codes import WRONG_CALL


@contextmanager
def demo_server(
    model: Path, served_name: str, port: int | None, admin_port: int | None, data_dir: Path | None, device: str
) -> Iterator[DemoServer]:
    """Ctrl-C or SIGTERM ends the block without an exception. At its end, the server stops.

    A DemoFailed of the block gets the path of the server's log, which stays after a failure.
    """
    with ExitStack() as stack:
        stack.enter_context(_ended_by_signals())
        is_temporary = data_dir is None
        if data_dir is None:
            data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loramux-demo-")))
        ports = _port(port, 8000), _port(admin_port, 8001)
        server = DemoServer(model, data_dir, *ports, served_name, device=device)
        stack.callback(server.stop)
        try:
            yield server
        except DemoFailed as error:
            if error.exit_code == WRONG_CALL:
                # The message is all that the server has logged.
                raise
            # The server may still write to the log while it stops.
            log = server.log
            if is_temporary:
                try:
                    log.chmod(0o600)
                    log = log.rename(data_dir.with_suffix(".log"))
                except OSError:
                    # The log is deleted with the directory.
                    raise error from None
            raise DemoFailed(f"{error}\nthe server's whole log is in {log}", error.exit_code) from error


def _port(given: int | None, preferred: int) -> int:
    """Return the requested port. Without one, return the preferred port if it is free, otherwise any free port."""
    if given is not None:
        return given
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise DemoFailed("no port is free on 127.0.0.1")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let Ctrl-C or SIGTERM end the block without an exception."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, previous)
