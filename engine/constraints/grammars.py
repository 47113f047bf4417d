"""Has grammars followed by other processes, one per tenant."""

from __future__ import annotations

import itertools
import math
import select
import socket
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from loramux.engine.constraints.grammar import Grammar
from loramux.engine.constraints.grammar_messages import Follow, Followed, Forget
from loramux.engine.constraints.limits import TOKEN_CPU_S
from loramux.engine.constraints.process_link import NOT_RUNNING, ProcessLink
from loramux.engine.constraints.tenant_fork import TenantFork
from loramux.engine.constraints.time_budgets import TimeBudgets
from loramux.engine.device.machine_limits import num_cpus
from loramux.engine.protocol.messages import GrammarCounts

TOO_COSTLY = "the grammar takes too much time or memory"

MAX_FORKS = 64
"""Maximum number of forks. The grammars of further tenants wait."""

TURN_S = 1.0
"""Time for which a tenant keeps its fork although grammars of other tenants wait for one, in seconds."""

IDLE_S = 60.0
"""A fork exits after this time without grammars, in seconds, and forgets its compiled grammars."""

WAIT_BURST_S, WAIT_PART = 5e-3, 0.1
"""Time that steps wait for the masks of one tenant at once, in seconds, and of all tenants as a part of the time."""

WORK_BURST_S, WORK_PART = 0.02, 0.01 * num_cpus()
"""Processor time that one tenant's grammars use at once, in seconds, and all tenants' continuously as a part of the
time: a hundredth of all cores. Counts while other tenants have requests too, and SHARED_S longer. FREE_TOKEN_S and
FREE_COMPILE_S do not count.
"""

SHARED_S = 2.0
"""Time for which other tenants count as present after their last request, in seconds. A tenant that sends short
requests would otherwise meet work that began between two of them.
"""

FREE_TOKEN_S, FREE_COMPILE_S = 0.5e-3, 0.05
"""Processor time that is free for each token and each compilation, in seconds. An ordinary schema needs 5 to 150
microseconds for a token.
"""

MAX_STARTS = 2
"""Number of attempts to start the process, after which the grammars that need it fail."""


class Grammars:
    """Sends the committed tokens of grammars to forks of one process, and collects the next masks.

    Each isolation key has its own fork. The operating system divides the processor between the forks, so a tenant's
    costly grammars delay only the tenant's own sequences. No two tenants share a compiled grammar, so a fast answer
    does not reveal which grammars another tenant uses. If a fork runs out of time or memory, a new fork takes over the
    tenant's grammars. It follows the one that the old fork was working on without looking ahead. If it runs out again
    on this grammar, the grammar fails.

    If more than MAX_FORKS tenants have grammars, they take turns. A fork ends for another tenant only while it has no
    work, and at most one does in a quarter of TURN_S. Its grammars are followed by a new fork when they need their next
    masks. The tenant does not pay for this, up to the processor time of ordinary grammars.

    Only `wait` and `close` block. The descriptor `fileno` becomes readable when `receive` has something to do.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = command
        self._environment = dict(environment)
        self._vocab_size = vocab_size
        self._clock = clock
        self._patience = TimeBudgets(clock, WAIT_BURST_S, WAIT_PART)
        self._work = TimeBudgets(clock, WORK_BURST_S, WORK_PART)
        self._shared_until_s = clock()
        self._epoll = select.epoll()
        self._process: ProcessLink | None = None
        self._num_starts = 0
        # Least recently used first.
        self._forks: OrderedDict[bytes, TenantFork] = OrderedDict()
        self._by_descriptor: dict[int, TenantFork] = {}
        self._serial = itertools.count()
        self._numbers: dict[Grammar, int] = {}
        # Grammars of tenants that wait for a fork.
        self._queue: OrderedDict[Grammar, None] = OrderedDict()
        self._turn_ended_s = -math.inf
        # Grammars of tenants whose budget for processor time is exhausted, by isolation key.
        self._held: dict[bytes, OrderedDict[Grammar, None]] = {}
        # In the order in which they became ready.
        self._settled: dict[Grammar, None] = {}
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._num_compiled = self._num_reused = self._num_masks = 0
        self._compile_s = self._mask_s = self._wait_s = 0.0

    def fileno(self) -> int:
        return self._epoll.fileno()

    def preload(self) -> None:
        """Start the process if it is not running. If called early, no request waits for it to load the vocabulary.

        Raises OSError if it cannot be started.
        """
        self._running()

    def request(self, isolation_key: bytes, text: str, share_key: str = "", vocab_size: int | None = None) -> Grammar:
        """Return a grammar for a new sequence. A later `poll` returns it once it is ready.

        `vocab_size` is the size of the adapter's vocabulary, or None for the base's vocabulary.
        """
        size = self._vocab_size if vocab_size is None else vocab_size
        grammar = Grammar(text, size, isolation_key, share_key, self)
        self._numbers[grammar] = next(self._serial)
        self.follow(grammar)
        return grammar

    def follow(self, grammar: Grammar) -> None:
        """Request the mask after the grammar's last token, now or once its tenant may use the processor again."""
        if self._must_wait(grammar):
            self._held.setdefault(grammar.isolation_key, OrderedDict())[grammar] = None
        else:
            self._send(grammar)

    def _send(self, grammar: Grammar) -> None:
        fork = self._forks.get(grammar.isolation_key) or self._begin_fork(grammar)
        if fork is None:
            return
        number = self._numbers[grammar]
        if number in fork.grammars:
            message = Follow(number, (grammar.tokens[-1],), looks_ahead=grammar.looks_ahead)
        else:
            fork.grammars[number] = grammar
            grammar.num_repeated = len(grammar.tokens)
            message = Follow(number, tuple(grammar.tokens), grammar.text, grammar.looks_ahead)
        self._forks.move_to_end(fork.isolation_key)
        try:
            fork.send(message)
        except OSError:
            # The fork ended before this message, so the grammar is not the cause.
            self._lose(fork)
            self._send(grammar)
        else:
            self._watch(fork)

    def note_settled(self, grammar: Grammar) -> None:
        self._settled[grammar] = None

    def leave(self, grammar: Grammar) -> None:
        """Forget a grammar, because its sequence has ended."""
        number = self._numbers.pop(grammar)
        self._queue.pop(grammar, None)
        held = self._held.get(grammar.isolation_key, OrderedDict())
        held.pop(grammar, None)
        fork = self._forks.get(grammar.isolation_key)
        if fork is None or fork.grammars.pop(number, None) is None:
            return
        fork.idle_since_s = self._clock()
        try:
            fork.send(Forget(number))
        except OSError:
            self._lose(fork)

    def note_sharing(self) -> None:
        """Note that several shares have sequences, so that the budgets for processor time count for SHARED_S."""
        self._shared_until_s = self._clock() + SHARED_S

    @property
    def _is_shared(self) -> bool:
        return self._clock() < self._shared_until_s

    def is_awaited(self, grammar: Grammar) -> bool:
        return not self.is_throttled(grammar) and self._patience.left(grammar.share_key) > 0

    def is_throttled(self, grammar: Grammar) -> bool:
        return self._is_shared and self._work.has_debt(grammar.share_key)

    def poll(self) -> list[Grammar]:
        """Return the grammars that have become ready, or have failed, since the last call."""
        self.receive()
        settled, self._settled = self._settled, {}
        # Others have accepted another token since then, and become ready again later.
        return [grammar for grammar in settled if grammar.is_ready]

    def wait(self, grammars: Iterable[Grammar], free_s: float, *, is_patient: bool = True) -> None:
        """Wait until the grammars are ready, or until the budgets of those that are not ready are exhausted.

        The first `free_s` seconds are not charged to the budgets. Without `is_patient`, wait no longer than that.
        """
        pending = [one for one in grammars if not one.is_ready and self.is_awaited(one)]
        started_s = self._clock()
        while pending:
            waited_s = self._clock() - started_s
            patience_s = max(self._patience.left(one.share_key) for one in pending) if is_patient else 0.0
            left_s = free_s - waited_s + patience_s
            forks = {fork.end: fork for one in pending if (fork := self._forks.get(one.isolation_key)) is not None}
            if left_s <= 0 or not forks:
                break
            unsent = [end for end, fork in forks.items() if fork.has_unsent]
            _await_any(list(forks), unsent, left_s)
            self.receive()
            late = [one for one in pending if not one.is_ready]
            self._charge({one.share_key for one in pending} - {one.share_key for one in late}, started_s, free_s)
            pending = late
        self._charge({one.share_key for one in pending}, started_s, free_s)
        self._wait_s += self._clock() - started_s

    def take_spent(self) -> dict[str, float]:
        """Return the processor time that each share's grammars have taken since the last call, in seconds."""
        if not self._spent:
            return {}
        spent, self._spent = self._spent, defaultdict(float)
        return spent

    def counts(self) -> GrammarCounts:
        """Counts and times since the engine started."""
        return GrammarCounts(
            num_compiled=self._num_compiled,
            num_reused=self._num_reused,
            compile_s=self._compile_s,
            num_masks=self._num_masks,
            mask_s=self._mask_s,
            wait_s=self._wait_s,
            num_processes=len(self._forks),
        )

    def close(self) -> None:
        """End all processes."""
        for fork in list(self._forks.values()):
            self._remove(fork)
        self._stop()
        self._epoll.close()

    def _charge(self, share_keys: Collection[str], started_s: float, free_s: float) -> None:
        charged_s = self._clock() - started_s - free_s
        for share_key in share_keys:
            self._patience.charge(share_key, charged_s)

    def receive(self) -> None:
        """Read the answers that have arrived, for the next `poll`, and end idle forks."""
        if not (self._forks or self._held or self._queue):
            # The common case: no system call is needed.
            return
        for descriptor, event in self._epoll.poll(0):
            fork = self._by_descriptor.get(descriptor)
            if fork is None:
                continue
            try:
                if event & select.EPOLLOUT:
                    fork.flush()
                for answer in fork.receive():
                    self._settle(fork, answer)
            except OSError:
                self._lose(fork)
            else:
                self._watch(fork)
        self._end_idle()
        if self._queue:
            # Before `_release`, which gives work to forks that have none at this time.
            self._serve_queue()
        self._release()

    def _must_wait(self, grammar: Grammar) -> bool:
        """Return whether the grammar's tenant has used too much processor time to begin more work now.

        A tenant with a debt has one mask computed at a time.
        """
        if not self.is_throttled(grammar):
            return False
        fork = self._forks.get(grammar.isolation_key)
        is_working = fork is not None and bool(fork.unanswered)
        return is_working or self._work.left(grammar.share_key) <= 0

    def _release(self) -> None:
        for isolation_key, held in list(self._held.items()):
            while held and not self._must_wait(next(iter(held))):
                self._send(held.popitem(last=False)[0])
            if not held:
                del self._held[isolation_key]

    def _settle(self, fork: TenantFork, answer: Followed) -> None:
        self._num_starts = 0
        grammar = fork.grammars.get(answer.number)
        if grammar is None:
            # The fork reports that it has begun, or the sequence has ended meanwhile.
            return
        free_s = FREE_TOKEN_S if answer.compile_s is None else FREE_COMPILE_S
        free_s += FREE_TOKEN_S * (len(answer.forced) + grammar.num_repeated)
        self._spent[grammar.share_key] += max(0.0, answer.cpu_s - free_s) if grammar.num_repeated else answer.cpu_s
        grammar.num_repeated = 0
        self._work.charge(grammar.share_key, answer.cpu_s - free_s)
        self._num_masks += len(answer.forced)
        if grammar.tokens:
            self._num_masks += 1
            self._mask_s += answer.cpu_s
        elif answer.compile_s is None:
            self._num_reused += 1
        else:
            self._num_compiled += 1
            self._compile_s += answer.compile_s
        grammar.compile_s = answer.compile_s
        grammar.settle(answer.mask, answer.forced, answer.failure)
        self._settled[grammar] = None

    def _watch(self, fork: TenantFork) -> None:
        """Have the epoll object report when an unsent message can be sent."""
        events = select.EPOLLIN | select.EPOLLOUT if fork.has_unsent else select.EPOLLIN
        if events != fork.events:
            self._epoll.modify(fork.end, events)
            fork.events = events

    def _begin_fork(self, grammar: Grammar) -> TenantFork | None:
        """Start a fork. If that is not possible now, queue the grammar. If it is not possible at all, fail it."""
        if len(self._forks) >= MAX_FORKS:
            idle = next((one for one in self._forks.values() if not one.grammars), None)
            if idle is None:
                self._queue[grammar] = None
                return None
            self._remove(idle)
        end = None
        while end is None:
            if self._process is None and self._num_starts >= MAX_STARTS:
                self._fail([grammar], NOT_RUNNING)
                return None
            try:
                process = self._running()
                end = process.fork()
            except OSError:
                self._stop()
        fork = self._forks[grammar.isolation_key] = TenantFork(grammar.isolation_key, end, process)
        fork.begun_s = fork.idle_since_s = self._clock()
        self._by_descriptor[end.fileno()] = fork
        self._epoll.register(end, fork.events)
        return fork

    def _lose(self, fork: TenantFork) -> None:
        """Handle the end of a fork."""
        self._remove(fork)
        unanswered = [fork.grammars[number] for number in fork.unanswered if number in fork.grammars]
        if fork.has_begun and not fork.process.has_ended:
            # The fork ran out of time or memory, or crashed.
            failed = unanswered[:1] if fork.unanswered and fork.unanswered[0] in fork.grammars else []
            reason = TOO_COSTLY
            if failed and failed[0].looks_ahead:
                # The answer may end before the tokens that were too costly.
                grammar = failed.pop()
                grammar.looks_ahead = False
                self._spent[grammar.share_key] += TOKEN_CPU_S
                self._work.charge(grammar.share_key, TOKEN_CPU_S)
        else:
            # The process has ended, which ends its forks, or has never started.
            reason = self._stop() if fork.process is self._process else NOT_RUNNING
            failed = unanswered if self._num_starts >= MAX_STARTS else []
        self._fail(failed, reason)
        for grammar in dict.fromkeys(unanswered):
            if grammar not in failed:
                self._send(grammar)

    def _fail(self, grammars: Sequence[Grammar], reason: str) -> None:
        for grammar in grammars:
            grammar.failure = reason
            self._settled[grammar] = None
        if grammars:
            # Later grammars may have the process started again.
            self._num_starts = 0

    def _remove(self, fork: TenantFork) -> None:
        del self._forks[fork.isolation_key]
        del self._by_descriptor[fork.end.fileno()]
        self._epoll.unregister(fork.end)
        fork.end.close()

    def _end_idle(self) -> None:
        idle = [one for one in self._forks.values() if not one.grammars]
        for fork in idle:
            if self._clock() - fork.idle_since_s > IDLE_S:
                self._remove(fork)

    def _serve_queue(self) -> None:
        """Start a fork for the first tenant in the queue, if there is room or the turn of another tenant is over."""
        if len(self._forks) >= MAX_FORKS and not any(not one.grammars for one in self._forks.values()):
            now_s = self._clock()
            if now_s - self._turn_ended_s < TURN_S / 4:
                return
            ready = (one for one in self._forks.values() if one.begun_s + TURN_S <= now_s and not one.unanswered)
            fork = min(ready, key=lambda one: one.begun_s, default=None)
            if fork is None:
                return
            self._turn_ended_s = now_s
            self._remove(fork)
        isolation_key = next(iter(self._queue)).isolation_key
        for grammar in [one for one in self._queue if one.isolation_key == isolation_key]:
            del self._queue[grammar]
            self._send(grammar)

    def _running(self) -> ProcessLink:
        if self._process is None:
            self._num_starts += 1
            self._process = ProcessLink(self._command, self._environment)
        return self._process

    def _stop(self) -> str:
        """Stop the process, and return why it could not be used."""
        process, self._process = self._process, None
        return NOT_RUNNING if process is None else process.stop()


def _await_any(readable: Sequence[socket.socket], writable: Sequence[socket.socket], timeout_s: float) -> None:
    """Wait until one of the sockets can be read or written."""
    try:
        select.select(readable, writable, [], timeout_s)
    except ValueError:
        # `select` cannot watch descriptors of 1,024 and above. `poll` can, but waits for whole milliseconds.
        poller = select.poll()
        for end in readable:
            poller.register(end, select.POLLIN | (select.POLLOUT if end in writable else 0))
        poller.poll(timeout_s * 1000)
