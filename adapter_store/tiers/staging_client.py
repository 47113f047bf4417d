"""The engine's side of staging: takes adapters from host memory, or makes the staging process load them there."""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import StoreError
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.tiers.host_slab import EngineMemory, mapped
from loramux.adapter_store.tiers.host_tier import HostTier
from loramux.adapter_store.tiers.staged_adapter import NotStaged, StagedAdapter
from loramux.adapter_store.tiers.staged_tables import num_table_bytes, parse_tables
from loramux.adapter_store.tiers.staging_link import StagingLink
from loramux.adapter_store.tiers.staging_messages import (
    MAX_PIECES,
    Cancel,
    Failed,
    FromStaging,
    Look,
    Looked,
    Occupied,
    Opened,
    Pong,
    Purge,
    Purged,
    Refused,
    Release,
    Stage,
    Staged,
    StagingConfig,
    decode_contents,
    decode_counts,
)
from loramux.adapter_store.tiers.tier_contents import TierContents
from loramux.adapter_store.tiers.tier_figures import LoadCounts, PassedStage, TierFigures, added, of_the_past

MAX_ASKED = 32
"""Maximum number of requests in flight to the staging process. Each may have a descriptor in transit."""

REQUESTS_PER_THREAD = 2
"""Least number of requests per thread of the staging process for which `takes` has room."""

MAX_TRIES = 2
"""A load fails, and a purge is given up, once this many staging processes have died during it."""

RESTART_S = 1.0
"""Shortest time between two starts of the staging process, in seconds."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class StagingRefused(StoreError):
    """The staging process cannot run. The message says how to fix it."""


@dataclass(slots=True, eq=False)
class _Request:
    """A pending load. The number distinguishes it from an earlier, cancelled request for the same adapter."""

    digest: str
    number: int
    stages: list[PassedStage]
    num_tries: int = 0


class StagingClient:
    """Takes adapters from host memory, or makes the staging process load them there.

    A process that dies or hangs is replaced. Its unanswered requests are repeated once, and the adapters that it has
    staged stay valid. `memory` contains the loaded adapters, except any that do not fit.

    Use it from one thread only. `open`, which comes first, and `close` wait for the process. Other methods block only
    briefly, to start a process or to reap a lost one. The client has no thread of its own, because a thread takes the
    GIL after each of its system calls: an S3 client holds it for milliseconds, and an engine step that waits for the
    GIL loses another tenth of a millisecond until it is woken. `wake` is called when `poll` has a result that does not
    make `fileno` readable. The constructor raises StagingRefused if no process can be started.
    """

    def __init__(
        self,
        target: PackTarget,
        blob_url: str,
        disk_dir: str,
        disk_bytes: int,
        model_dir: str,
        memory: EngineMemory,
        host: HostTier,
        num_threads: int,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        quantized_dir: str | None = None,
    ) -> None:
        self._target = target
        self._config = StagingConfig(
            blob_url=blob_url,
            disk_dir=disk_dir,
            disk_bytes=disk_bytes,
            target=target.document(),
            model_dir=model_dir,
            quantized_dir=quantized_dir,
            num_threads=num_threads,
        )
        self._memory = memory
        self._host = host
        self._wake = wake
        self._clock = clock
        # If the host tier is small, loads may use the part of the shared memory that is kept free for them.
        self.max_bytes = max(host.max_bytes, memory.array.size - host.max_bytes)
        self._max_requests = self._least_requests = min(REQUESTS_PER_THREAD * num_threads, MAX_ASKED)
        # Number of requests that the process has answered since the last `poll`, without cancelled ones.
        self._num_answered = 0
        self.figures = TierFigures(held=host.held)
        """Counts of this process. `counts` adds the staging processes' counts."""
        self._numbers = itertools.count()
        # All pending requests, the requests not yet sent to the process, and the results of finished requests.
        self._requests: dict[str, _Request] = {}
        self._waiting: deque[str] = deque()
        # Digests whose files the process has not been told to delete, and how many processes have been told to delete
        # the files of others and have not answered.
        self._purged: deque[str] = deque()
        self._purging: dict[str, int] = {}
        self._results: dict[str, StagedAdapter | NotStaged] = {}
        # Requests that the current process has not answered, by number, including cancelled ones.
        self._asked: dict[int, str] = {}
        # Size in bytes of the last loaded adapter. The host tier reserves as much for each adapter being loaded.
        self._last_bytes = 0
        self._looks: deque[Callable[[], None]] = deque()
        self._answered_looks: list[Callable[[], None]] = []
        # Counts of former processes, and the current process's counts, which are decoded only on demand.
        self._past_counts = TierFigures().snapshot()
        self._process_counts: msgspec.Raw | None = None
        self._disk: TierContents | None = None
        self._refusal: str | None = None
        self._link: StagingLink | None = None
        self._is_opened = False
        try:
            self._start()
        except OSError as error:
            raise StagingRefused(f"the process that fetches adapters cannot be started: {error.strerror}") from error

    @property
    def pid(self) -> int | None:
        """PID of the running process, or None if there is none."""
        return None if self._link is None else self._link.process.pid

    @property
    def host_memory(self) -> npt.NDArray[np.uint8]:
        """The memory of the host tier, uint8 `[num_bytes]`."""
        return self._memory.array[: self._host.max_bytes]

    def open(self, timeout_s: float) -> None:
        """Make the process open its tiers, and wait for it. Raises StagingRefused on failure or timeout.

        Until then, the process has only started, and has read and changed no tier.
        """
        due_s = time.monotonic() + timeout_s
        if self._link is not None:
            self._configure(self._link)
        while not self._is_opened:
            if self._refusal is not None:
                raise StagingRefused(self._refusal)
            if self._link is None or not self._link.wait(due_s - time.monotonic()):
                raise StagingRefused("the process that fetches adapters did not start")
            self._receive()

    # The adapter pool calls the following methods.

    def takes(self, digest: str) -> bool:
        """True if the adapter is in host memory, or if the staging process has few requests.

        It may have twice as many as it answered before the last `poll`. Its threads are then busy until the next one,
        and an adapter that is suddenly first in the queue waits for few others.
        """
        return digest in self._host or len(self._requests) < self._max_requests

    def request(self, digest: str) -> None:
        """Start loading an adapter into host memory. `poll` returns the result.

        A digest can have only one request at a time.
        """
        assert digest not in self._requests
        assert digest not in self._results
        stages: list[PassedStage] = []
        with self.figures.noting(stages), self.figures.timed("host", "lookup"):
            packed = self._host.lease(digest)
        self.figures.count_lookup("host", packed is not None)
        if packed is not None:
            self._results[digest] = StagedAdapter(packed, self._host.release, stages)
        elif not _DIGEST.fullmatch(digest):
            self._results[digest] = NotStaged(digest, "the requested digest is malformed", stages)
        else:
            self._requests[digest] = _Request(digest, next(self._numbers), stages)
            self._waiting.append(digest)
            self._reserve()
            self._ask()
        if digest in self._results:
            self._wake()

    def cancel(self, digest: str) -> None:
        """Cancel a request. `poll` will not return its result."""
        result = self._results.pop(digest, None)
        if isinstance(result, StagedAdapter):
            result.release()
        request = self._requests.pop(digest, None)
        if request is None:
            return
        if request.number in self._asked and self._link is not None:
            self._link.send(Cancel(request.number))
        else:
            self._waiting.remove(digest)
        self._reserve()

    def forget(self, digest: str) -> None:
        """Delete the adapter's copy in host memory, unless it is in use, and its files in the disk tier, soon."""
        self._host.forget(digest)
        if _DIGEST.fullmatch(digest):
            self._purged.append(digest)
            self._ask()

    def poll(self) -> list[StagedAdapter | NotStaged]:
        """Return the results of requests that have finished since the last call."""
        has_unsent = self._link is not None and self._link.has_unsent
        if (
            self._asked
            or self._looks
            or self._memory.has_unused
            or has_unsent
            or self._waiting
            or self._purged
            or self._purging
        ):
            self._receive()
        self._max_requests = min(max(self._least_requests, 2 * self._num_answered), MAX_ASKED)
        self._num_answered = 0
        results, self._results = self._results, {}
        return list(results.values())

    # The engine's process calls the following methods.

    def fileno(self) -> int:
        """Return a descriptor that is readable when `attend` has work to do, or -1 while there is no process."""
        return -1 if self._link is None else self._link.fileno()

    def attend(self) -> None:
        """Receive the messages that have arrived, and run the callbacks registered with `look`."""
        self._receive()
        answered, self._answered_looks = self._answered_looks, []
        for then in answered:
            then()

    def look(self, then: Callable[[], None]) -> None:
        """Request the disk tier's contents. `attend` calls `then` once `contents` is updated or cannot be updated."""
        if self._link is None:
            self._answered_looks.append(then)
        else:
            self._looks.append(then)
            self._link.send(Look())

    def contents(self) -> tuple[TierContents, ...]:
        host = self._host.contents()
        return (host,) if self._disk is None else (host, self._disk)

    def counts(self) -> LoadCounts:
        """Return the total counts of this process and all its staging processes."""
        return added(self.figures.snapshot(), self._counts_of_processes())

    def close(self) -> None:
        for digest in [*self._results, *self._requests]:
            self.cancel(digest)
        if self._link is not None:
            if self._is_opened:
                self._link.close()
            else:
                # It has nothing to finish, and may still be starting.
                self._link.end()
            self._link = None

    # The following methods manage the staging process.

    def _start(self) -> StagingLink:
        self._release_unused()
        link = self._link = StagingLink(self._memory.descriptor, self._clock)
        self._started_s = self._clock()
        self._is_opened = False
        self._refusal = None
        return link

    def _configure(self, link: StagingLink) -> None:
        link.send(self._config)
        pieces = self._memory.pieces
        for begin in range(0, len(pieces), MAX_PIECES):
            link.send(Occupied(tuple(pieces[begin : begin + MAX_PIECES])))

    def _ask(self) -> None:
        if not self._waiting and not self._purged:
            return
        # Release unused memory first, so that these requests can reuse it.
        self._release_unused()
        link = self._link
        if link is None:
            if self._clock() < self._started_s + RESTART_S:
                # It is too early to start another process. `poll` tries again.
                return
            self._started_s = self._clock()
            try:
                link = self._start()
            except OSError:
                self._waiting.clear()
                self._fail(list(self._requests.values()))
                return
            self._configure(link)
        while self._purged:
            digest = self._purged.popleft()
            self._purging[digest] = self._purging.get(digest, 0) + 1
            link.send(Purge(digest))
        while self._waiting and len(self._asked) < MAX_ASKED:
            request = self._requests[self._waiting.popleft()]
            request.num_tries += 1
            self._asked[request.number] = request.digest
            link.send(Stage(request.number, request.digest))

    def _release_unused(self) -> None:
        begins = self._memory.take_unused()
        if self._link is not None:
            for begin in range(0, len(begins), MAX_PIECES):
                self._link.send(Release(tuple(begins[begin : begin + MAX_PIECES])))

    def _receive(self) -> None:
        self._release_unused()
        link = self._link
        if link is not None:
            link.flush()
            for message, descriptors in link.packets():
                self._take(link, message, descriptors)
            if self._asked or self._looks:
                link.watch()
            if link.is_lost:
                self._lose(link)
        self._ask()

    def _take(self, link: StagingLink, message: FromStaging, descriptors: list[int]) -> None:
        match message:
            case Opened(counts=counts):
                self._is_opened = True
                self._process_counts = counts
            case Refused(message=text):
                self._refusal = text
            case Staged(begin=begin):
                request = self._answered(message)
                memory = None if begin is not None else _content(descriptors)
                if request is None:
                    if begin is not None:
                        link.send(Release((begin,)))
                elif begin is None and memory is None:
                    self._settle(request, "there is not enough memory for the adapter")
                else:
                    self._keep(request, self._packed(request.digest, message, memory))
            case Failed(message=text):
                request = self._answered(message)
                if request is not None:
                    self._settle(request, text)
            case Looked(counts=counts):
                self._process_counts = counts
                content = _content(descriptors)
                if content is not None:
                    self._disk = decode_contents(content.data)
                self._answered_looks.append(self._looks.popleft())
            case Purged(digest=digest):
                self._purging.pop(digest, None)
            case Pong():
                # Any message shows that the process is alive: see `StagingLink.watch`.
                pass

    def _answered(self, message: Staged | Failed) -> _Request | None:
        """Return the request that a message answers, or None if the request was cancelled."""
        self._process_counts = message.counts
        request = self._requests.get(self._asked.pop(message.number, ""))
        if request is None or request.number != message.number:
            return None
        del self._requests[request.digest]
        self._num_answered += 1
        self._reserve()
        request.stages.extend(message.stages)
        return request

    def _packed(self, digest: str, staged: Staged, memory: npt.NDArray[np.uint8] | None) -> PackedAdapter:
        """Return an adapter whose pages are in the packet's memory or in the shared memory."""
        geometry = self._target.geometry
        table_shape = geometry.num_layers, len(self._target.all_modules)
        if staged.tables:
            tables = zlib.decompress(staged.tables)
        else:
            assert memory is not None
            memory, of_tables = np.split(memory, [memory.size - num_table_bytes(table_shape)])
            tables = of_tables.tobytes()
        ranks, scales = parse_tables(tables, table_shape)
        outer_ranks = np.frombuffer(staged.outer_ranks, np.int32)
        layout = self._target.layout(ranks, outer_ranks, staged.has_affines, staged.rows)
        shape = (layout.num_pages, geometry.num_layers, geometry.page_bytes)
        if memory is None:
            assert staged.begin is not None
            memory = self._memory.use(staged.begin, math.prod(shape))
        return PackedAdapter(
            digest,
            layout,
            scales,
            memory.reshape(shape),
            np.frombuffer(staged.outer_scales, np.float32).copy(),
        )

    def _keep(self, request: _Request, packed: PackedAdapter) -> None:
        self._last_bytes = packed.payload.nbytes
        self._host.add(packed, num_leases=1)
        self._results[request.digest] = StagedAdapter(packed, self._host.release, request.stages)

    def _settle(self, request: _Request, message: str) -> None:
        self._results[request.digest] = NotStaged(request.digest, message, request.stages)

    def _reserve(self) -> None:
        """Reserve room for the adapters being loaded, assuming that each is as large as the last loaded adapter."""
        self._host.reserve(self._last_bytes * min(len(self._requests), self._config.num_threads))

    def _lose(self, link: StagingLink) -> None:
        """Handle the end of the process: queue its unanswered requests for another process, or fail them."""
        self._link = None
        code = link.end()
        if self._refusal is None:
            print(f"the staging process died: exit code {code}", file=sys.stderr)
        self._past_counts = of_the_past(self._counts_of_processes())
        self._process_counts = None
        self._asked.clear()
        self._fail([request for request in self._requests.values() if request.num_tries >= MAX_TRIES])
        self._waiting = deque(self._requests)
        self._purging = {digest: num_tries for digest, num_tries in self._purging.items() if num_tries < MAX_TRIES}
        self._purged = deque(dict.fromkeys((*self._purged, *self._purging)))
        self._answered_looks += self._looks
        self._looks.clear()

    def _fail(self, requests: list[_Request]) -> None:
        reason = self._refusal or "the process that fetches adapters died"
        for request in requests:
            del self._requests[request.digest]
            self._settle(request, f"adapter {request.digest[:12]} cannot be loaded: {reason}")
        self._reserve()

    def _counts_of_processes(self) -> LoadCounts:
        if self._process_counts is None:
            return self._past_counts
        return added(self._past_counts, decode_counts(self._process_counts))


def _content(descriptors: list[int]) -> npt.NDArray[np.uint8] | None:
    """Return a copy of the memory that came with a packet, or None if there is none or it cannot be mapped.

    A mapping would keep its descriptor open, and a process can have only a limited number of descriptors.
    """
    try:
        return mapped(descriptors[0]).copy() if descriptors else None
    except OSError:
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
