"""Adapters are divided among the workers on a thread of their own, and sent between two steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.tiers.staged_adapter import StagedAdapter
from loramux.engine.adapters.adapter_load import AdapterLoad
from loramux.engine.adapters.page_copier import QUICK_COPY_BYTES
from loramux.engine.parallel.parallel_execution import ParallelCopier
from loramux.engine.parallel.worker_messages import PlaceAdapter, ToWorker
from loramux.engine.parallel.workers import Workers
from loramux.kernels.layout import AdapterLayout

WAIT_S = 60.0


def packed(num_bytes: int) -> PackedAdapter:
    layout = AdapterLayout(np.zeros((1, 1), np.int32), np.zeros((1, 1, 3), np.int32), num_pages=1)
    return PackedAdapter("digest", layout, np.ones((1, 1), np.float32), np.zeros((1, 1, num_bytes), np.uint8))


class Divider:
    """Gives each of two workers the whole adapter once `may_divide` is set."""

    def __init__(self, failure: str | None = None) -> None:
        self.may_divide = threading.Event()
        self.threads: list[int] = []
        self._failure = failure

    def shares_of(self, whole: PackedAdapter) -> list[PackedAdapter]:
        self.threads.append(threading.get_ident())
        assert self.may_divide.wait(WAIT_S)
        if self._failure is not None:
            raise ValueError(self._failure)
        return [whole, whole]


class SentMessages:
    encode = staticmethod(Workers.encode)

    def __init__(self) -> None:
        self.placed: list[tuple[int, list[int]]] = []

    def send_each(self, messages: Sequence[bytes]) -> None:
        for encoded in messages:
            message = msgspec.msgpack.decode(encoded, type=ToWorker)
            assert isinstance(message, PlaceAdapter)
            self.placed.append((message.slot, message.pages))


class Copies:
    """A copier that has copied an adapter at the next poll."""

    def __init__(self) -> None:
        self.copied: list[AdapterLoad] = []

    def copy(self, load: AdapterLoad) -> None:
        self.copied.append(load)

    def poll(self) -> list[tuple[AdapterLoad, str | None]]:
        return [(load, None) for load in self.copied]

    def close(self) -> None:
        pass


class Subject:
    def __init__(self, num_bytes: int, failure: str | None = None) -> None:
        self.divider, self.workers, self.copies = Divider(failure), SentMessages(), Copies()
        self.woken = threading.Event()
        self.copier = ParallelCopier(self.copies, self.workers, self.divider, self.woken.set)  # type: ignore[arg-type]
        self.released: list[str] = []
        self.load = self.new_load(num_bytes)

    def new_load(self, num_bytes: int) -> AdapterLoad:
        load = AdapterLoad(None, "digest")  # type: ignore[arg-type]
        load.slot, load.pages = 3, [5, 2]
        load.staged = StagedAdapter(packed(num_bytes), self.released.append)
        return load

    def divide(self, sizes: Sequence[int]) -> None:
        """Divide further adapters, and return once all of them have been divided."""
        loads = [self.new_load(num_bytes) for num_bytes in sizes]
        self.divider.may_divide.set()
        for load in loads:
            self.copier.copy(load)
        self.copier._thread.submit(lambda: None).result(WAIT_S)


@pytest.mark.parametrize("num_bytes", [1, QUICK_COPY_BYTES + 1])
def test_an_adapter_is_divided_on_another_thread_and_sent_by_the_engines(num_bytes: int) -> None:
    subject = Subject(num_bytes)
    subject.copier.copy(subject.load)
    # The adapter cannot have been divided so far.
    assert (subject.copier.poll(), subject.workers.placed, subject.released) == ([], [], [])
    subject.divider.may_divide.set()
    assert subject.woken.wait(WAIT_S)
    assert (subject.workers.placed, subject.released) == ([], [])
    assert subject.copier.poll() == [(subject.load, None)]
    assert (subject.workers.placed, subject.released) == ([(3, [5, 2])], ["digest"])
    assert subject.divider.threads != [threading.get_ident()]
    subject.copier.close()


@pytest.mark.parametrize(
    ("sizes", "num_placed"),
    [([1, 1, 1], [3]), ([QUICK_COPY_BYTES + 1] * 3, [1, 2, 3]), ([1, QUICK_COPY_BYTES, 1, 1], [2, 4])],
)
def test_a_poll_sends_at_most_one_large_adapter(sizes: list[int], num_placed: list[int]) -> None:
    subject = Subject(1)
    subject.divide(sizes)
    for number in num_placed:
        subject.woken.clear()
        subject.copier.poll()
        assert len(subject.workers.placed) == number
        # An idle engine polls again for the rest.
        assert subject.woken.is_set() == (number < len(sizes))
    subject.copier.close()


def test_an_adapter_that_is_still_being_divided_at_the_end_is_not_sent() -> None:
    subject = Subject(1)
    subject.copier.copy(subject.load)
    subject.copier.copy(subject.new_load(1))
    closing = threading.Thread(target=subject.copier.close)
    closing.start()
    subject.divider.may_divide.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert (subject.workers.placed, subject.released) == ([], [])


def test_an_adapter_that_cannot_be_divided_fails(capsys: pytest.CaptureFixture[str]) -> None:
    subject = Subject(QUICK_COPY_BYTES + 1, failure="no memory")
    subject.divider.may_divide.set()
    subject.copier.copy(subject.load)
    assert subject.woken.wait(WAIT_S)
    assert subject.copier.poll() == [(subject.load, "dividing failed: ValueError")]
    assert (subject.workers.placed, subject.copies.copied) == ([], [])
    assert "dividing adapter digest among the workers failed" in capsys.readouterr().err
    subject.copier.close()
