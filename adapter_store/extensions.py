"""Parts that other distributions add to loramux with entry points: see `docs/extending.md`.

An `ExtensionKind` is declared beside the built-in parts of its kind. It reads the entry points of its group when a name
is first looked up, and imports only the extensions that are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from loramux.adapter_store.errors import StoreError, printable

Product = TypeVar("Product")

PREFIX = "loramux."
"""The names of all groups begin with this prefix."""

MAX_REASON = 300
"""Longest excerpt of an extension's own error in a message, in characters."""

_NAME = re.compile(r"[a-z][a-z0-9+._-]{0,63}")


class ExtensionRefused(StoreError):
    """An installed extension cannot be used. The message is one sentence that names it and its distribution."""


@dataclass(frozen=True, slots=True)
class Extension:
    """An imported extension. `kind` says what it adds, such as `blob store`. `value` is what its entry point names."""

    kind: str
    name: str
    distribution: str
    """The name and version of the distribution that offers it."""
    value: Any

    def __str__(self) -> str:
        return f"the {self.kind} {self.name!r} of {self.distribution}"


def read_entries() -> Mapping[str, Sequence[EntryPoint]]:
    """Read the entry points of all installed distributions, by groups whose names begin with PREFIX.

    Of a distribution that is installed twice, the first on the path counts, as for an import.
    """
    found = entry_points()
    return {group: tuple(found.select(group=group)) for group in found.groups if group.startswith(PREFIX)}


@cache
def installed() -> Mapping[str, Sequence[EntryPoint]]:
    """Return the result of `read_entries`, which is read once per process, like a module."""
    return read_entries()


def extension_names(group: str) -> tuple[str, ...]:
    """Return the names in a group, sorted. Nothing is imported or checked."""
    return tuple(sorted({entry.name for entry in installed().get(f"{PREFIX}{group}", ())}))


def problem_with_callable(value: object) -> str | None:
    return None if callable(value) else f"is {_described(value)}, not a class or function"


class ExtensionKind(Generic[Product]):
    """One kind of part that extensions can add.

    The entry points of `group` name classes or functions that return a `product`: a class, an ABC or a runtime
    checkable protocol. No extension can have a name in `taken`. `problem` returns what is wrong with the value of an
    entry point, or None.
    """

    def __init__(
        self,
        group: str,
        kind: str,
        product: type[Any],
        taken: Collection[str] = (),
        problem: Callable[[object], str | None] = problem_with_callable,
        read: Callable[[], Mapping[str, Sequence[EntryPoint]]] = installed,
    ) -> None:
        self.group = f"{PREFIX}{group}"
        self.kind = kind
        self._product = product
        self._taken = frozenset(taken)
        self._problem = problem
        self._read = read
        self._found: dict[str, Extension] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the installed extensions, sorted. Nothing is imported. Raises ExtensionRefused."""
        return tuple(sorted(self._offers))

    def find(self, name: str) -> Extension | None:
        """Import the extension of this name, or return None if no distribution offers it. Raises ExtensionRefused."""
        entry = self._offers.get(name)
        if entry is None:
            return None
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = self._imported(entry)
        return found

    def load_all(self) -> list[Extension]:
        """Import all extensions of this kind. Raises ExtensionRefused for the first that cannot be used."""
        loaded = []
        for found in self.try_all():
            if isinstance(found, ExtensionRefused):
                raise found
            loaded.append(found)
        return loaded

    def try_all(self) -> Iterator[Extension | ExtensionRefused]:
        """Import all extensions of this kind, and yield the error of each that cannot be used."""
        try:
            names = self.names
        except ExtensionRefused as refused:
            yield refused
            return
        for name in names:
            try:
                extension = self.find(name)
            except ExtensionRefused as refused:
                yield refused
            else:
                assert extension is not None
                yield extension

    def make(self, name: str, *arguments: object, **named: object) -> Product | None:
        """Call the extension of this name and return its product, or None if no distribution offers the name.

        A StoreError of the extension is passed on. Raises ExtensionRefused if the extension fails with another error,
        or if it returns something else.
        """
        extension = self.find(name)
        if extension is None:
            return None
        try:
            product = extension.value(*arguments, **named)
        except StoreError:
            raise
        except Exception as error:
            raise ExtensionRefused(f"{extension} failed: {_reason(error)}") from error
        if not isinstance(product, self._product):
            raise ExtensionRefused(f"{extension} returned {_described(product)} instead of {self._product.__name__}")
        return cast(Product, product)

    def required(self, name: str, *arguments: object, **named: object) -> Product:
        """Return the product of the extension of this name, as `make` does, or raise ExtensionRefused."""
        product = self.make(name, *arguments, **named)
        if product is None:
            raise ExtensionRefused(f"no installed distribution offers the {self.kind} {name!r}")
        return product

    @cached_property
    def _offers(self) -> Mapping[str, EntryPoint]:
        offers: dict[str, EntryPoint] = {}
        for entry in self._read().get(self.group, ()):
            if not _NAME.fullmatch(entry.name):
                raise ExtensionRefused(
                    f"{self._title(entry)} cannot have this name: use lower-case letters, digits, '+', '.', '_' and '-'"
                )
            if entry.name in self._taken:
                raise ExtensionRefused(
                    f"{self._title(entry)} has the name of a built-in {self.kind}: rename it or uninstall it"
                )
            first = offers.setdefault(entry.name, entry)
            if first is not entry:
                raise ExtensionRefused(
                    f"the {self.kind} {entry.name!r} is offered twice, by {distribution_of(first)} and by "
                    f"{distribution_of(entry)}: uninstall one of them"
                )
        return offers

    def _imported(self, entry: EntryPoint) -> Extension:
        try:
            value = entry.load()
        except (Exception, SystemExit) as error:
            raise ExtensionRefused(
                f"{self._title(entry)} cannot be imported ({_reason(error)}): repair or uninstall it"
            ) from error
        problem = self._problem(value)
        if problem is not None:
            raise ExtensionRefused(f"{self._title(entry)} {problem}: repair or uninstall it")
        return Extension(self.kind, entry.name, distribution_of(entry), value)

    def _title(self, entry: EntryPoint) -> str:
        return f"the {self.kind} {printable(entry.name, 64)!r} of {distribution_of(entry)}"


def unread_entries(kinds: Iterable[ExtensionKind[Any]]) -> list[EntryPoint]:
    """Return the entry points in groups that look like those of loramux, but that no kind reads."""
    known = {kind.group for kind in kinds}
    return [entry for group, entries in sorted(installed().items()) if group not in known for entry in entries]


def distribution_of(entry: EntryPoint) -> str:
    """Return the name and version of the distribution that offers an entry point."""
    found = entry.dist
    return "an unknown distribution" if found is None else f"{found.name} {found.version}"


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return printable(f"{type(error).__name__}: {text[0]}" if text else type(error).__name__, MAX_REASON)
