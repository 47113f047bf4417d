"""The names in a PEFT configuration. `NAME` stands for all modules whose names are `NAME` or end with `.NAME`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


def suffixes(key: str) -> Iterator[str]:
    """Yield the names that stand for the module `key`: `a.b.c`, `b.c` and `c` stand for `a.b.c`."""
    yield key
    at = key.find(".")
    while at >= 0:
        yield key[at + 1 :]
        at = key.find(".", at + 1)


class NamePatterns(Generic[V]):
    """Looks up values by name. A lookup takes the same time for thousands of names as for one."""

    def __init__(self, pairs: Iterable[tuple[str, V]]) -> None:
        self._values: dict[str, tuple[int, V]] = {}
        for order, (name, value) in enumerate(pairs):
            self._values.setdefault(name, (order, value))

    def value(self, key: str, default: V) -> V:
        """Return the value of the first name that stands for `key`, or `default`."""
        if not self._values:
            return default
        found = [self._values[name] for name in suffixes(key) if name in self._values]
        return min(found, key=lambda one: one[0])[1] if found else default

    def match(self, key: str) -> str | None:
        """Return the longest name that stands for `key`, or None."""
        return next((name for name in suffixes(key) if name in self._values), None) if self._values else None


def name_set(names: Iterable[str]) -> NamePatterns[None]:
    return NamePatterns((name, None) for name in names)
