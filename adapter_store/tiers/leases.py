"""A hold on a packed adapter in host memory."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from loramux.adapter_store.formats.packing import PackedAdapter


class Lease:
    """A counted hold on an adapter in host memory; release it once, or leave its `with` block."""

    __slots__ = ("_give_back", "_is_released", "packed")

    def __init__(self, packed: PackedAdapter, give_back: Callable[[str], None]) -> None:
        self.packed = packed
        self._give_back = give_back
        self._is_released = False

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._give_back(self.packed.digest)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
