"""Runs an engine on a thread of this process."""

from __future__ import annotations

import os
import select
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.device.device_faults import device_fault
from loramux.engine.loop.assembly import AssembledEngine, assemble_engine
from loramux.engine.loop.config import EngineConfig
from loramux.engine.loop.engine import Engine
from loramux.engine.protocol.messages import Abort, Add, EngineReady, Finished, SequenceOutput, StepOutput

LOADING_POLL_S = 0.05
"""Longest wait for an event while no sequence can run, for example because adapters are being copied, in seconds."""


class EngineClosed(RuntimeError):
    """The engine has been closed, or has failed, or belongs to another process. A note has a failure's traceback."""


Event = SequenceOutput | Finished | EngineClosed
"""What a sequence's queue receives. After a Finished or an EngineClosed, nothing follows."""


class EngineThread:
    """An engine that has a thread of its own, because CUDA's current stream belongs to a thread. Thread-safe."""

    def __init__(self, config: EngineConfig, adapters: Mapping[str, PackedAdapter]) -> None:
        """Assemble the engine, which takes seconds. Raises EngineError.

        `adapters` is keyed by digest. The engine reads it whenever it loads an adapter, so adapters can be added later.
        """
        self._calls: SimpleQueue[Callable[[Engine], None]] = SimpleQueue()
        self._queues: dict[str, SimpleQueue[Event]] = {}
        self._woken, self._waker = os.pipe()
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
        # Guards the two fields below and additions to the queues, so that nothing is added that nobody would read.
        self._lock = threading.Lock()
        self._is_closing = False
        self._end: tuple[str, ...] | None = None
        """Why the engine has ended, and the traceback of a failure.

        The failure itself would keep the weights and the pool in memory.
        """
        self._process = os.getpid()
        started: Future[EngineReady] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(config, adapters, started), name="loramux engine", daemon=True
        )
        self._thread.start()
        try:
            self.ready = started.result()
        except BaseException:
            self.close()
            raise

    def check_open(self) -> None:
        """Raise EngineClosed if calls can no longer be answered."""
        if os.getpid() != self._process:
            # This process is a fork, which has no copy of the thread.
            raise EngineClosed(
                f"this LLM belongs to the process {self._process}: create one in each process, or use threads"
            )
        if self._end is not None:
            raise _closed(*self._end)
        if self._is_closing:
            raise _closed()

    def add(self, add: Add, events: SimpleQueue[Event]) -> None:
        """Add a sequence, whose output goes to `events`. Several sequences can share a queue. Raises EngineClosed."""
        self._call(lambda engine: engine.add(b"", add), add.sequence_id, events)

    def abort(self, sequence_id: str) -> None:
        """Stop a sequence, if it has not ended. Its queue receives a Finished."""
        # An engine that has ended has no sequences.
        with suppress(EngineClosed):
            self._call(lambda engine: engine.abort(b"", Abort(sequence_id=sequence_id)))

    def close(self) -> None:
        """End all sequences with EngineClosed, and free the engine's memory. May be called again."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._is_closing = True
        self._wake()
        self._thread.join()

    def _call(
        self, call: Callable[[Engine], None], sequence_id: str = "", events: SimpleQueue[Event] | None = None
    ) -> None:
        # In a fork, another thread of the parent may have held the lock.
        self.check_open()
        with self._lock:
            self.check_open()
            if events is not None:
                self._queues[sequence_id] = events
            self._calls.put(call)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._end is None:
                # If the pipe is full, the thread wakes up anyway.
                with suppress(BlockingIOError):
                    os.write(self._waker, b"\0")

    def _run(self, config: EngineConfig, adapters: Mapping[str, PackedAdapter], started: Future[EngineReady]) -> None:
        end: tuple[str, ...] = ()
        try:
            assembled = assemble_engine(config, self._wake, MemoryStager(adapters))
            try:
                started.set_result(assembled.ready)
                self._serve(assembled)
            finally:
                assembled.close()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            else:
                end = f"the engine failed: {device_fault(error) or repr(error)}", traceback.format_exc()
        with self._lock:
            self._end = end
            for descriptor in (self._woken, self._waker):
                os.close(descriptor)
        for events in self._queues.values():
            events.put(_closed(*end))

    def _serve(self, assembled: AssembledEngine) -> None:
        engine = assembled.engine
        # `select` cannot watch descriptors of 1,024 and above, which a notebook with many files has.
        poller = select.poll()
        for descriptor in (self._woken, assembled.grammars.fileno()):
            poller.register(descriptor, select.POLLIN)
        while not self._is_closing:
            while not self._calls.empty():
                self._calls.get()(engine)
            ran = engine.step() if engine.has_work else False
            for outbound in engine.take_outbox():
                match outbound.message:
                    case StepOutput(outputs=outputs):
                        for output in outputs:
                            self._queues[output.sequence_id].put(output)
                    case Finished() as finished:
                        self._queues.pop(finished.sequence_id).put(finished)
            if not ran:
                timeout_ms = LOADING_POLL_S * 1000 if engine.has_work else None
                if self._woken in dict(poller.poll(timeout_ms)):
                    os.read(self._woken, 4096)
                assembled.grammars.receive()


def _closed(message: str = "the engine is closed", failure: str = "") -> EngineClosed:
    closed = EngineClosed(message)
    if failure:
        closed.add_note(failure)
    return closed
