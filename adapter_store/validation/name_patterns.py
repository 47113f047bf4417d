"""The names in a PEFT configuration. `NAME` stands for all modules whose names are `NAME` or end with `.NAME`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MAX_NAME_LEN = 200
"""Longest name of a module, in characters."""


def is_literal(name: str) -> bool:
    """Return whether a text is a module's name, and not a regular expression."""
    return 0 < len(name) <= MAX_NAME_LEN and name.isascii() and name.replace(".", "").replace("_", "").isalnum()


def suffixes(key: str) -> Iterator[str]:
    """Yield the names that stand for the module `key`: `a.b.c`, `b.c` and `c` stand for `a.b.c`."""
    yield key
    at = key.find(".")
    while at >= 0:
        yield key[at + 1 :]
        at = key.find(".", at + 1)


class NameSet:
    """A set of names. A lookup takes the same time for thousands of names as for one."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def match(self, key: str) -> str | None:
        """Return the longest name that stands for `key`, or None."""
        return next((name for name in suffixes(key) if name in self._names), None) if self._names else None
