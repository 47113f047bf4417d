"""What the slow part of loading an adapter does, and what it tells the engine thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from loramux.kernels.layout import AdapterLayout


@dataclass(frozen=True, slots=True)
class Fetched:
    """A packed file is in memory: its layout, and a hold on it that `copy` consumes."""

    digest: str
    layout: AdapterLayout


@dataclass(frozen=True, slots=True)
class Copied:
    """An adapter's pages are filled."""

    digest: str


@dataclass(frozen=True, slots=True)
class LoadFailed:
    digest: str
    message: str


LoadEvent = Fetched | Copied | LoadFailed


class AdapterLoader(Protocol):
    """Does the slow part of loading elsewhere; its events are collected by the engine thread between steps."""

    def fetch(self, digest: str) -> None:
        """Begin to bring the packed file into memory; ends with Fetched or LoadFailed."""

    def cancel(self, digest: str) -> None:
        """Give a fetch up that has told nothing yet, and never will."""

    def copy(self, digest: str, pages: list[int]) -> None:
        """Begin to copy the fetched file into pages, or do it at once; ends with Copied or LoadFailed."""

    def publish(self, digest: str, slot: int, pages: list[int]) -> None:
        """Write the slot's tables, now, on the engine thread; releases the hold on the fetched file."""

    def drop(self, digest: str) -> None:
        """Release the hold on a fetched file that will not be copied."""

    def events(self) -> list[LoadEvent]:
        """What has happened since the last call, in order."""
