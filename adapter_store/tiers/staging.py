"""The engine's side of staging: asks whichever process runs for adapters, and gets them in memory that both share."""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import StoreError
from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.formats.packing import PackedAdapter
from loramux.adapter_store.tiers.host_slab import mapped, piece_of, shared_memory
from loramux.adapter_store.tiers.staging_link import StagingLink
from loramux.adapter_store.tiers.staging_messages import (
    MAX_NUMBERS,
    Cancel,
    Failed,
    FromStaging,
    Look,
    Looked,
    Occupied,
    Opened,
    Pong,
    Refused,
    Release,
    Stage,
    Staged,
    StagingConfig,
    decode_contents,
    decode_counts,
)
from loramux.adapter_store.tiers.tier_contents import TierContents
from loramux.adapter_store.tiers.tier_figures import LoadCounts, TierFigures, added, of_the_past

MAX_ASKED = 32
"""Adapters that the process is asked for at a time: so many descriptors may be on their way."""

MAX_TRIES = 2
"""Processes that may die over one adapter."""

RESTART_S = 1.0
"""A process that dies younger is not followed by another before it would have been as old."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class StagingRefused(StoreError):
    """The staging process cannot work; the message says how to mend it."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedAdapter:
    """An adapter in memory, which is given back once the last view of its payload is gone."""

    number: int
    packed: PackedAdapter

    @property
    def digest(self) -> str:
        return self.packed.digest


@dataclass(frozen=True, slots=True)
class NotStaged:
    """An adapter that cannot be had, and why."""

    number: int
    digest: str
    message: str


@dataclass(slots=True)
class _Wish:
    digest: str
    num_tries: int = 0


class StagingProcess:
    """Starts the process, asks it, and follows one that dies or hangs by another. Belongs to one thread, never waits.

    What was asked for is answered once in `outcomes`, or never where it was cancelled. What a dying process had not
    answered the next one is asked for, once; what was given out stays as it is. `memory`, uint8 `[num_bytes]`, is where
    adapters lie, but for those for which it has no room. Raises StagingRefused where there can be no process.
    """

    def __init__(
        self,
        target: PackTarget,
        blob_url: str,
        disk_dir: str,
        disk_bytes: int,
        memory_bytes: int,
        num_threads: int,
        figures: TierFigures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._config = StagingConfig(
            blob_url=blob_url,
            disk_dir=disk_dir,
            disk_bytes=disk_bytes,
            target=target.document(),
            num_threads=num_threads,
        )
        self._figures = figures
        self._memory_fd = shared_memory(memory_bytes)
        weakref.finalize(self, os.close, self._memory_fd)
        self.memory = mapped(self._memory_fd)
        self._clock = clock
        self._numbers = itertools.count()
        # What somebody waits for; of that what this process has yet to be asked for; what it has yet to answer.
        self._wishes: dict[int, _Wish] = {}
        self._waiting: deque[int] = deque()
        self._asked: set[int] = set()
        # Of the shared memory what is in use, begin and length by number, and numbers that came back from any thread.
        self._given_out: dict[int, tuple[int, int]] = {}
        self._returned: deque[int] = deque()
        self._outcomes: list[StagedAdapter | NotStaged] = []
        self._looks: deque[Callable[[], None]] = deque()
        self._answered_looks: list[Callable[[], None]] = []
        # What processes that are gone counted, and what this one did, which is decoded when somebody asks.
        self._past_counts = TierFigures().snapshot()
        self._counts: msgspec.Raw | None = None
        self._refusal: str | None = None
        self._link: StagingLink | None = None
        self._is_opened = False
        self.contents: TierContents | None = None
        """What the disk tier held when somebody last looked."""
        figures.elsewhere = self._counted
        try:
            self._start()
        except OSError as error:
            raise StagingRefused(f"the process that fetches adapters cannot be started: {error.strerror}") from error

    @property
    def pid(self) -> int | None:
        """Of the process that runs; None while there is none."""
        return None if self._link is None else self._link.process.pid

    def fileno(self) -> int:
        """Readable when `receive` has something to do; -1 while there is no process."""
        return -1 if self._link is None else self._link.fileno()

    def await_opened(self, timeout_s: float) -> None:
        """Wait for the process to have opened its tiers. Raises StagingRefused."""
        due_s = time.monotonic() + timeout_s
        while not self._is_opened:
            if self._refusal is not None:
                raise StagingRefused(self._refusal)
            if self._link is None or not self._link.wait(due_s - time.monotonic()):
                raise StagingRefused("the process that fetches adapters did not start")
            self.receive()

    def stage(self, digest: str) -> int:
        """Ask for an adapter; the result is the number of its outcome."""
        number = next(self._numbers)
        if not _DIGEST.fullmatch(digest):
            self._outcomes.append(NotStaged(number, digest, "what was asked for is no digest"))
            return number
        self._wishes[number] = _Wish(digest)
        self._waiting.append(number)
        self._ask()
        return number

    def cancel(self, number: int) -> None:
        """Nobody waits for this outcome any more, and none comes."""
        if self._wishes.pop(number, None) is None:
            self._outcomes = [one for one in self._outcomes if one.number != number]
        elif self._link is not None and number in self._asked:
            self._link.send(Cancel(number))
        else:
            self._waiting.remove(number)

    def look(self, then: Callable[[], None]) -> None:
        """Have `contents` renewed; `answer_looks` calls `then` once they are, or cannot be."""
        if self._link is None:
            self._answered_looks.append(then)
        else:
            self._looks.append(then)
            self._link.send(Look())

    def answer_looks(self) -> None:
        """Call back who looked."""
        answered, self._answered_looks = self._answered_looks, []
        for then in answered:
            then()

    @property
    def has_outcomes(self) -> bool:
        """Whether `outcomes` has something without anything having come: what could not even be asked for."""
        return bool(self._outcomes)

    def outcomes(self) -> list[StagedAdapter | NotStaged]:
        """What was answered since the last call; to be called again and again while something is waited for."""
        has_unsent = self._link is not None and self._link.has_unsent
        if self._asked or self._looks or self._returned or has_unsent or self._waiting:
            self.receive()
        found, self._outcomes = self._outcomes, []
        return found

    def receive(self) -> None:
        """Take in what the process has said, or that it died."""
        self._give_back()
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

    def close(self) -> None:
        """End the process and forget what it was asked for."""
        self._outcomes.clear()
        self._wishes.clear()
        self._waiting.clear()
        if self._link is not None:
            self._link.close()
            self._link = None

    def _start(self) -> StagingLink:
        self._give_back()
        link = self._link = StagingLink(self._memory_fd, self._clock)
        self._started_s = self._clock()
        self._is_opened = False
        self._refusal = None
        link.send(self._config)
        pieces = [(number, *piece) for number, piece in self._given_out.items()]
        for begin in range(0, len(pieces), MAX_NUMBERS):
            link.send(Occupied(tuple(pieces[begin : begin + MAX_NUMBERS])))
        return link

    def _ask(self) -> None:
        if not self._waiting:
            return
        # First, so that its memory can be used for this.
        self._give_back()
        link = self._link
        if link is None:
            if self._clock() < self._started_s + RESTART_S:
                # Later: see `outcomes`.
                return
            self._started_s = self._clock()
            try:
                link = self._start()
            except OSError:
                self._fail(list(self._wishes))
                self._waiting.clear()
                return
        while self._waiting and len(self._asked) < MAX_ASKED:
            number = self._waiting.popleft()
            wish = self._wishes.get(number)
            if wish is not None:
                wish.num_tries += 1
                self._asked.add(number)
                link.send(Stage(number, wish.digest))

    def _give_back(self) -> None:
        """Tell the process what is no longer used."""
        numbers = []
        while self._returned:
            number = self._returned.popleft()
            del self._given_out[number]
            numbers.append(number)
        if self._link is not None:
            for begin in range(0, len(numbers), MAX_NUMBERS):
                self._link.send(Release(tuple(numbers[begin : begin + MAX_NUMBERS])))

    def _take(self, link: StagingLink, message: FromStaging, descriptors: list[int]) -> None:
        match message:
            case Opened(counts=counts):
                self._is_opened = True
                self._counts = counts
            case Refused(message=text):
                self._refusal = text
            case Staged(number=number, begin=begin):
                wish = self._answered(message)
                memory = None if begin is not None else _content(descriptors)
                if wish is None:
                    if begin is not None:
                        link.send(Release((number,)))
                elif begin is None and memory is None:
                    self._outcomes.append(NotStaged(number, wish.digest, "there is no memory for the adapter"))
                else:
                    self._outcomes.append(StagedAdapter(number, self._packed(wish.digest, message, memory)))
            case Failed(number=number, message=text):
                wish = self._answered(message)
                if wish is not None:
                    self._outcomes.append(NotStaged(number, wish.digest, text))
            case Looked(counts=counts):
                self._counts = counts
                content = _content(descriptors)
                if content is not None:
                    self.contents = decode_contents(content.data)
                self._answered_looks.append(self._looks.popleft())
            case Pong():
                # It was enough to hear something: see `StagingLink.watch`.
                pass

    def _packed(self, digest: str, staged: Staged, memory: npt.NDArray[np.uint8] | None) -> PackedAdapter:
        """An adapter in memory of its own, or else in what is shared."""
        geometry = self._target.geometry
        ranks = np.frombuffer(staged.ranks, np.int32).reshape(geometry.num_layers, -1)
        layout = self._target.layout(ranks, np.frombuffer(staged.outer_ranks, np.int32))
        shape = (layout.num_pages, geometry.num_layers, geometry.page_bytes)
        if memory is None:
            assert staged.begin is not None
            piece = staged.begin, math.prod(shape)
            self._given_out[staged.number] = piece
            memory = piece_of(self.memory, *piece, partial(self._returned.append, staged.number))
        return PackedAdapter(
            digest,
            layout,
            np.frombuffer(staged.scales, np.float32).reshape(ranks.shape).copy(),
            memory.reshape(shape),
            np.frombuffer(staged.outer_scales, np.float32).copy(),
        )

    def _answered(self, message: Staged | Failed) -> _Wish | None:
        """Whose wish it was, unless nobody waits for it any more."""
        self._counts = message.counts
        self._asked.discard(message.number)
        wish = self._wishes.pop(message.number, None)
        if wish is not None and self._figures.timelines is not None:
            self._figures.timelines.extend(wish.digest, message.stages)
        return wish

    def _lose(self, link: StagingLink) -> None:
        """The process is gone: what it owed is asked of another one, or failed."""
        self._link = None
        code = link.end()
        if self._refusal is None:
            print(f"the staging process ended: exit code {code}", file=sys.stderr)
        self._past_counts = of_the_past(self._counted())
        self._counts = None
        self._asked.clear()
        self._fail([number for number, wish in self._wishes.items() if wish.num_tries >= MAX_TRIES])
        self._waiting = deque(self._wishes)
        self._answered_looks += self._looks
        self._looks.clear()

    def _fail(self, numbers: list[int]) -> None:
        for number in numbers:
            wish = self._wishes.pop(number)
            reason = self._refusal or "the process that fetches adapters ended"
            message = f"adapter {wish.digest[:12]} cannot be loaded: {reason}"
            self._outcomes.append(NotStaged(number, wish.digest, message))

    def _counted(self) -> LoadCounts:
        return self._past_counts if self._counts is None else added(self._past_counts, decode_counts(self._counts))


def _content(descriptors: list[int]) -> npt.NDArray[np.uint8] | None:
    """A copy of the memory that came with a packet; None where there were no descriptors or no memory to be had.

    A mapping would keep its descriptor, of which a process has few.
    """
    try:
        return mapped(descriptors[0]).copy() if descriptors else None
    except OSError:
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
