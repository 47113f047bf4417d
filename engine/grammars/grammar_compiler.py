"""Compiles the grammars of sequences on a separate thread."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loramux.engine.grammars.grammar import NO_MASKS, Grammar, Mask, Masks, problem_of
from loramux.engine.grammars.limits import STACK_BYTES, parser_limits
from loramux.engine.grammars.vocabulary import VocabularyNotUsable
from loramux.engine.messages import GrammarCounts

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 64
"""Maximum number of compiled grammars kept for all tenants together."""

MAX_COMPILED_PER_KEY = 8
"""Maximum number of compiled grammars kept per isolation key."""

CLOSE_S = 0.5
"""Longest time that `close` waits for a running compilation, in seconds."""

NICENESS = 10
"""Niceness of the compiling thread, so that the threads that run steps get the CPU first."""


@dataclass(frozen=True, slots=True)
class _Job:
    isolation_key: bytes
    grammar: str


class GrammarCompiler:
    """Compiles grammars, caches them, and gives a copy to every sequence that requests one.

    Only sequences with the same isolation key share a compiled grammar, so a fast answer does not reveal which grammars
    another tenant has compiled. Isolation keys take turns on the thread, so a tenant need not wait until all grammars
    of another tenant are compiled. Call all methods on the engine's thread. The compiling thread calls `wake` when
    `poll` has results.
    """

    def __init__(self, load_vocabulary: Callable[[], LLTokenizer], vocab_size: int, wake: Callable[[], None]) -> None:
        self._load_vocabulary = load_vocabulary
        self._vocab_size = vocab_size
        self._wake = wake
        self._serial = itertools.count()
        self._compiled: OrderedDict[_Job, LLMatcher] = OrderedDict()
        self._waiting: dict[_Job, list[Grammar]] = {}
        # Guards the data that both threads use: the jobs of each key, with the keys in turn order, and the results.
        self._lock = threading.Condition()
        self._jobs: OrderedDict[bytes, deque[_Job]] = OrderedDict()
        self._results: list[tuple[_Job, LLMatcher | str, float]] = []
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._num_compiled = 0
        self._num_reused = 0
        self._compile_s = 0.0
        self._num_masks = 0
        self._mask_s = 0.0

    def request(self, isolation_key: bytes, grammar: str, vocab_size: int | None = None) -> Grammar:
        """Return a grammar for a new sequence. It is ready immediately if it is cached, otherwise after a later `poll`.

        `vocab_size` is the size of the adapter's vocabulary, or None for the base's vocabulary.
        """
        # Sequences with an empty key do not share grammars.
        job = _Job(isolation_key or next(self._serial).to_bytes(8), grammar)
        requested = Grammar(self._vocab_size if vocab_size is None else vocab_size)
        compiled = self._compiled.get(job)
        if compiled is not None:
            self._compiled.move_to_end(job)
            self._num_reused += 1
            requested.begin(compiled.deep_copy())
            return requested
        waiting = self._waiting.setdefault(job, [])
        waiting.append(requested)
        if len(waiting) == 1:
            with self._lock:
                self._jobs.setdefault(job.isolation_key, deque()).append(job)
                self._lock.notify()
            self.preload()
        return requested

    def preload(self) -> None:
        """Start the thread, which first loads the vocabulary. If called early, no request waits for the vocabulary."""
        if self._thread is None:
            self._thread = self._start()

    def poll(self) -> set[Grammar]:
        """Update the grammars that have been compiled or have failed since the last call, and return them."""
        if not self._waiting:
            return set()
        with self._lock:
            results, self._results = self._results, []
        settled: set[Grammar] = set()
        for job, result, seconds in results:
            waiting = self._waiting.pop(job)
            self._num_compiled += 1
            self._compile_s += seconds
            self._num_reused += len(waiting) - 1
            settled.update(waiting)
            for grammar in waiting:
                if isinstance(result, str):
                    grammar.failure = result
                else:
                    grammar.begin(result.deep_copy())
            if not isinstance(result, str):
                self._keep(job, result)
        return settled

    def masks(self, grammars: Mapping[int, Grammar]) -> Masks:
        """Compute the masks of the sample rows that have a grammar, by row."""
        if not grammars:
            return NO_MASKS
        started_s = time.perf_counter()
        masks: dict[int, Mask] = {}
        for row, grammar in grammars.items():
            mask = grammar.mask()
            if mask is not None:
                masks[row] = mask
        self._num_masks += len(masks)
        self._mask_s += time.perf_counter() - started_s
        return masks

    def counts(self) -> GrammarCounts:
        """Counts and times of compilations and masks since the engine started."""
        return GrammarCounts(
            num_compiled=self._num_compiled,
            num_reused=self._num_reused,
            compile_s=self._compile_s,
            num_masks=self._num_masks,
            mask_s=self._mask_s,
        )

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Stop compiling, and wait for the running compilation. Returns False if it takes longer than `timeout_s`.

        In that case, the process must exit without finalizing Python, because the compiler would otherwise return to an
        interpreter that no longer exists.
        """
        with self._lock:
            self._is_closed = True
            self._lock.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _keep(self, job: _Job, compiled: LLMatcher) -> None:
        same_key = [one for one in self._compiled if one.isolation_key == job.isolation_key]
        if len(same_key) >= MAX_COMPILED_PER_KEY:
            del self._compiled[same_key[0]]
        elif len(self._compiled) >= MAX_COMPILED:
            self._compiled.popitem(last=False)
        self._compiled[job] = compiled

    def _start(self) -> threading.Thread:
        previous = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            thread.start()
        finally:
            threading.stack_size(previous)
        return thread

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        vocabulary: LLTokenizer | str
        try:
            vocabulary = self._load_vocabulary()
        except VocabularyNotUsable as error:
            vocabulary = str(error)
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._jobs or self._is_closed)
                if self._is_closed:
                    return
                isolation_key, jobs = self._jobs.popitem(last=False)
                job = jobs.popleft()
                if jobs:
                    self._jobs[isolation_key] = jobs
            started_s = time.perf_counter()
            result = vocabulary if isinstance(vocabulary, str) else _compile(job.grammar, vocabulary)
            with self._lock:
                self._results.append((job, result, time.perf_counter() - started_s))
            self._wake()


def _compile(grammar: str, vocabulary: LLTokenizer) -> LLMatcher | str:
    """Return the compiled grammar, or the reason why it cannot be compiled."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        # Compute the first mask's lexer states here, because all copies share them.
        matcher.compute_bitmask()
    return problem_of(matcher) if matcher.is_error() else matcher
