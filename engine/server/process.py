"""The engine process: `python -m loramux.engine.server.process SOCKET RECORD`.

The process reads its configuration as JSON from standard input. RECORD is the file descriptor of the shared memory
through which the supervisor tracks the loop's progress.

The loop receives messages from gateways, runs one step, and sends the output. It blocks only when there is nothing to
do. The process exits when standard input closes, so it does not outlive the supervisor, which holds the other end open.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if __name__ == "__main__":
    # Until `freeze_gc`, because imports create many objects and drop few.
    gc.disable()

from loramux.engine.device.device_faults import device_fault
from loramux.engine.loop.assembly import AssembledEngine, assemble_engine
from loramux.engine.loop.config import EngineConfig
from loramux.engine.parallel.workers import WorkerLost
from loramux.engine.protocol.errors import EngineError
from loramux.engine.protocol.messages import (
    Abort,
    Add,
    Credit,
    Extend,
    ForgetPrefixes,
    FromEngine,
    Heartbeat,
    Load,
    Pin,
    Rejected,
    StatsRequest,
    ToEngine,
    Unload,
)
from loramux.engine.server.gateway_link import GatewayLink
from loramux.engine.server.gc_freeze import freeze_gc
from loramux.engine.server.step_record import StepRecord

if TYPE_CHECKING:
    from loramux.engine.tracing.otel_spans import OtelSpanSink

EXIT_REFUSED = 3
"""Exit status if the engine cannot start. The reason is the last line on standard error."""

EXIT_DEVICE_FAILED = 4
"""Exit status if the device fails while serving. The reason is the last line on standard error."""

LOADING_POLL_MS = 50
"""Longest wait for an event, in milliseconds, while no sequence can run, for example because adapters are loading. The
stager usually wakes the loop sooner.
"""

IDLE_POLL_MS = 250
"""Longest wait of an idle loop, in milliseconds. It is short enough to keep `StepRecord` fresh for the supervisor."""

HEARTBEAT_S = 1.0
"""Heartbeat interval, in seconds: the longest time until the engine notices that a gateway without output is gone."""

END_GRACE_S = 1.0
"""Time limit for the loop to stop after the supervisor is gone, in seconds. A hung step must not keep the device
occupied.
"""


class EngineServer:
    """Serves one engine to gateways over a ROUTER socket."""

    def __init__(
        self, assembled: AssembledEngine, socket: Any, wake_fd: int, record: StepRecord, ended: threading.Event
    ) -> None:
        import zmq

        self._engine = assembled.engine
        self._stager = assembled.stager
        self._grammars = assembled.grammars
        self._workers = assembled.workers
        self._stager_fd = -1
        self._num_looks = 0
        self._ready = assembled.ready
        self._socket = socket
        self._wake_fd = wake_fd
        self._record = record
        self._ended = ended
        self._links: dict[bytes, GatewayLink] = {}
        # Messages that have been read and not handled, and the answers to malformed ones, with their gateways.
        self._unhandled: deque[tuple[bytes, ToEngine | Rejected]] = deque()
        self._is_urgent = False
        self._engine.has_urgent = self._has_urgent
        self._next_heartbeat_s = 0.0
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._zmq = zmq
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(wake_fd, zmq.POLLIN)
        self._poller.register(self._grammars.fileno(), zmq.POLLIN)
        self._worker_fds = frozenset(() if self._workers is None else self._workers.filenos())
        for descriptor in self._worker_fds:
            self._poller.register(descriptor, zmq.POLLIN)

    def serve(self) -> None:
        ran = False
        while not self._ended.is_set():
            self._receive(self._timeout_ms(ran))
            self._beat()
            ran = self._engine.step() if self._engine.has_work else False
            if self._num_looks:
                self._stager.attend()
            if self._engine.num_sequences == 0:
                self._record.note_running([])
            self._record.note_pass()
            for outbound in self._engine.take_outbox():
                link = self._links.get(outbound.owner)
                if link is not None:
                    link.post(outbound.message)

    def _beat(self) -> None:
        """Detect lost gateways that get no output because their sequences wait or they have granted no credit."""
        now_s = time.monotonic()
        if now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + HEARTBEAT_S
            for link in list(self._links.values()):
                link.post(Heartbeat())

    def _timeout_ms(self, ran: bool) -> int:
        if ran:
            return 0
        return LOADING_POLL_MS if self._engine.has_work else IDLE_POLL_MS

    def _receive(self, timeout_ms: int) -> None:
        """Handle all pending messages, waiting at most `timeout_ms` for the first event."""
        self._follow_stager()
        ready = dict(self._poller.poll(timeout_ms))
        if self._wake_fd in ready:
            os.read(self._wake_fd, 4096)
        if self._stager_fd in ready:
            self._stager.attend()
        self._grammars.receive()
        if self._workers is not None and not self._worker_fds.isdisjoint(ready):
            self._workers.check()
        self._read()
        self._is_urgent = False
        while self._unhandled:
            self._dispatch(*self._unhandled.popleft())

    def _has_urgent(self) -> bool:
        """True if a sequence that is no background sequence has arrived since the step began."""
        self._read()
        return self._is_urgent

    def _read(self) -> None:
        """Read all pending messages. Sends nothing and leaves the engine as it is, because a step may be running."""
        while True:
            try:
                owner, *frames = self._socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            try:
                message = self._decoder.decode(b"".join(frames))
            except msgspec.DecodeError as error:
                # One gateway's malformed message must not affect the others.
                self._unhandled.append((owner, Rejected(message=f"a message could not be read: {error}")))
                continue
            self._unhandled.append((owner, message))
            self._is_urgent |= isinstance(message, Add) and not message.is_background

    def _follow_stager(self) -> None:
        """Poll the stager's current file descriptor, which changes when the staging process is replaced."""
        descriptor = self._stager.fileno()
        if descriptor != self._stager_fd:
            if self._stager_fd >= 0:
                self._poller.unregister(self._stager_fd)
            if descriptor >= 0:
                self._poller.register(descriptor, self._zmq.POLLIN)
            self._stager_fd = descriptor

    def _dispatch(self, owner: bytes, message: ToEngine | Rejected) -> None:
        self._link(owner)
        if owner not in self._links:
            # The gateway disconnected after sending the message, so the answer could not be delivered.
            return
        match message:
            case Rejected():
                self._link(owner).post(message)
            case Add():
                self._engine.add(owner, message)
            case Extend():
                self._engine.extend(owner, message)
            case Abort():
                self._engine.abort(owner, message)
            case Load():
                self._engine.load(owner, message)
            case Unload():
                self._engine.unload(owner, message)
            case Pin():
                self._engine.pin(owner, message)
            case ForgetPrefixes():
                self._engine.forget_prefixes(owner, message)
            case StatsRequest(with_tiers=True):
                self._num_looks += 1
                self._stager.look(lambda: self._answer(owner, message))
            case StatsRequest():
                self._link(owner).post(self._engine.stats(message))
            case Credit(count=count):
                self._link(owner).grant(count)

    def _answer(self, owner: bytes, request: StatsRequest) -> None:
        self._num_looks -= 1
        link = self._links.get(owner)
        if link is not None:
            link.post(self._engine.stats(request))

    def _link(self, owner: bytes) -> GatewayLink:
        """The gateway's link. The gateway's first message creates the link and is answered with EngineReady."""
        link = self._links.get(owner)
        if link is None:
            link = self._links[owner] = GatewayLink(lambda message: self._send(owner, message))
            link.post(self._ready)
        return link

    def _send(self, owner: bytes, message: FromEngine) -> None:
        try:
            self._socket.send_multipart([owner, self._encoder.encode(message)], self._zmq.NOBLOCK)
        except self._zmq.ZMQError:
            # ROUTER_MANDATORY reports that the gateway is gone, so nobody would read the output of its sequences.
            self._links.pop(owner, None)
            self._engine.abort_all(owner)


def main() -> None:
    """Assemble the engine and serve it.

    Exits with EXIT_REFUSED if the configuration or the device is unusable, and with EXIT_DEVICE_FAILED if the device
    fails later, each with a one-sentence message. Running sequences end with the process. The supervisor and the
    gateways detect that it has exited.
    """
    # Ctrl-C is sent to the whole process group. The supervisor decides when the engine exits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    document = sys.stdin.buffer.readline()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)

    def wake() -> None:
        try:
            os.write(wake_write, b"\0")
        except BlockingIOError:
            # The pipe is full, so the loop will wake up anyway.
            return

    ended, closed = threading.Event(), threading.Event()
    threading.Thread(target=_follow_supervisor, args=(ended, closed, wake), name="supervisor", daemon=True).start()
    record = StepRecord(int(sys.argv[2]))
    try:
        config = msgspec.json.decode(document, type=EngineConfig)
        spans = _open_spans(config)
        assembled = assemble_engine(config, wake, note_running=record.note_running, spans=spans)
    except (EngineError, ValueError) as error:
        _end_with_worker(error)
        print(str(error), file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    except Exception as error:
        end_for_device(error, "the GPU cannot be used", EXIT_REFUSED)
        raise
    _serve(assembled, Path(sys.argv[1]), wake_read, record, ended)
    closed.set()
    if spans is not None:
        spans.close(END_GRACE_S / 4)


def _open_spans(config: EngineConfig) -> OtelSpanSink | None:
    if config.traces is None:
        return None
    from loramux.engine.tracing.otel_spans import OtelSpanSink, open_provider

    return OtelSpanSink(open_provider(config.traces, "loramux-engine"))


def _follow_supervisor(ended: threading.Event, closed: threading.Event, wake: Callable[[], None]) -> None:
    """Stop the loop when standard input closes. Kill the process if the loop does not stop. Runs on its own thread."""
    while os.read(sys.stdin.fileno(), 4096):
        # No input is expected after the configuration. Only the end of input matters.
        continue
    ended.set()
    wake()
    if not closed.wait(END_GRACE_S):
        os._exit(1)


def _end_with_worker(error: Exception) -> None:
    """Exit as a tensor-parallel worker did if the last line on standard error is its reason. Otherwise, return."""
    if isinstance(error, WorkerLost) and error.status in (EXIT_REFUSED, EXIT_DEVICE_FAILED):
        os._exit(error.status)


def end_for_device(error: Exception, what: str, code: int) -> None:
    """Exit with a one-sentence message if the device caused the error. Otherwise, return.

    Nothing is torn down, because calls to a broken device may hang or print more lines after the message.
    """
    fault = device_fault(error)
    if fault is not None:
        print(f"{what}: {fault}", file=sys.stderr, flush=True)
        os._exit(code)


def _serve(assembled: AssembledEngine, path: Path, wake_read: int, record: StepRecord, ended: threading.Event) -> None:
    """Serve until the supervisor is gone."""
    import zmq

    context = zmq.Context(io_threads=1)
    socket = context.socket(zmq.ROUTER)
    # The queues are bounded by credits. A high-water mark would drop messages.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.LINGER, 0)
    previous = os.umask(0o177)
    socket.bind(f"ipc://{path}")
    os.umask(previous)
    try:
        with suppress(OSError):
            # If the process cannot be started, requests with grammars fail.
            assembled.grammars.preload()
        server = EngineServer(assembled, socket, wake_read, record, ended)
        freeze_gc()
        server.serve()
    except Exception as error:
        _end_with_worker(error)
        end_for_device(error, "the GPU failed", EXIT_DEVICE_FAILED)
        raise
    finally:
        socket.close()
        context.term()
        assembled.close()


if __name__ == "__main__":
    # Imports leave little garbage. Otherwise, `freeze_gc` would look for it among 300,000 objects, which takes 0.2 s.
    gc.freeze()
    threading.current_thread().name = "engine"
    main()
