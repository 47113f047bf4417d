"""Chooses values of `rank_pattern` and `alpha_pattern` as PEFT does."""

from __future__ import annotations

import re
import signal
import time
import warnings
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Generic, TypeVar

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.text_names import text_module
from loramux.adapter_store.validation.name_patterns import is_literal, suffixes

V = TypeVar("V")

MATCHING_S = 0.5
"""CPU time that all regular expressions of one table may use, in seconds.

224 modules and as many expressions take about a twentieth of it.
"""


class PatternKeys(Generic[V]):
    """One of the tables: its keys, in file order, and their values.

    PEFT runs every key as a regular expression, `(.*\\.)?(KEY)$`, against the name of each module that it adapts, and
    uses the first key that matches. A key that is the end of the name of a module in `modules` is looked up instead,
    with the same result. Every other key runs as an expression, within `MATCHING_S`.
    """

    def __init__(self, table: str, pairs: Sequence[tuple[str, V]], modules: Container[str]) -> None:
        self._table = table
        self._pairs = pairs
        self._literals: dict[str, int] = {}
        self._expressions: list[int] = []
        self._compiled: dict[int, re.Pattern[str]] = {}
        self._left_s = MATCHING_S
        self._unmatched = dict.fromkeys(range(len(pairs)))
        for order, (key, _) in enumerate(pairs):
            # An escaped dot is still a dot.
            literal = text_module(key.replace("\\.", "."))
            if is_literal(literal) and literal in modules:
                self._literals.setdefault(literal, order)
            else:
                self._expressions.append(order)

    @property
    def unmatched(self) -> list[str]:
        """The keys that have matched no module so far."""
        return [f"{self._table}.{self._pairs[order][0]}" for order in self._unmatched]

    def value(self, module: str, trained_name: str, default: V) -> V:
        """Return the value of the first key that matches a module, or `default`.

        `trained_name` is the module's name in the model that was trained, which PEFT matches. Raises AdapterRejected
        for an expression that PEFT cannot compile, or that takes too long.
        """
        orders = [self._literals[name] for name in suffixes(module) if name in self._literals]
        if self._expressions:
            orders += self._matching(trained_name, min(orders, default=len(self._pairs)))
        for order in orders:
            self._unmatched.pop(order, None)
        return self._pairs[min(orders)][1] if orders else default

    def _matching(self, name: str, first: int) -> list[int]:
        """Return the expressions that match a name: at least the first, if it precedes `first`, and all new ones."""
        key, found = "", []
        start_s = time.process_time()
        try:
            with limited_cpu_time(max(self._left_s, 1e-6)):
                for order in self._expressions:
                    # A later match does not change the value, but shows that the key is used.
                    if order < first or order in self._unmatched:
                        key = self._pairs[order][0]
                        if self._pattern(order, key).match(name) is not None:
                            found.append(order)
                            first = min(first, order)
        except CpuTimeExceeded:
            raise self._refusal(key, "this regular expression takes too long to match: name the modules") from None
        except (re.error, OverflowError, RecursionError):
            raise self._refusal(key, "this regular expression is malformed, so PEFT cannot load it either") from None
        finally:
            self._left_s -= time.process_time() - start_s
        return found

    def _pattern(self, order: int, key: str) -> re.Pattern[str]:
        if order not in self._compiled:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._compiled[order] = re.compile(rf"(.*\.)?({key})$")
        return self._compiled[order]

    def _refusal(self, key: str, message: str) -> AdapterRejected:
        return AdapterRejected("unsupported_config", message, f"{self._table}.{key}")


class CpuTimeExceeded(Exception):
    """The block used more CPU time than allowed."""


@contextmanager
def limited_cpu_time(limit_s: float) -> Iterator[None]:
    """Raise CpuTimeExceeded inside the block once the process has used `limit_s` of CPU time in user mode.

    Python's regular expressions check for signals while they match. Only the main thread can use this limit.
    """
    previous = signal.signal(signal.SIGVTALRM, _exceed)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if previous is None else previous)


def _exceed(signal_number: int, frame: FrameType | None) -> None:
    raise CpuTimeExceeded
