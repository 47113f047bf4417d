"""Checks constraints before they are admitted, so that no tenant's grammar reaches the engine unchecked."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from loramux.adapter_store.sandbox.confined_pool import (
    ConfinedPool,
    Ended,
    ForkLimits,
    ForkServerFailed,
    TooManyWaiting,
)
from loramux.adapter_store.sandbox.confinement import REQUIRED
from loramux.engine.device.machine_limits import num_cpus
from loramux.platform.errors import InvalidRequest, RateLimited, Unavailable
from loramux.platform.grammars.constraint import Constraint

CPU_S = 1
"""Limit on a check's processor time, in seconds."""

QUICK = ForkLimits(wall_s=1.0, cpu_s=0.1, niceness=5)
"""Limits of a check's first attempt. A 20 kB schema takes about 60 ms. The engine and the gateway have a higher
priority.
"""

FULL = ForkLimits(wall_s=30.0, cpu_s=CPU_S, niceness=19)
"""Limits of a check's second attempt. It has the lowest priority, like all checks of tenants that are not light (see
`Lanes`), so that they hardly delay steps of the engine. On a core that another process keeps busy, it gets about 1 % of
the time. A check that exceeds the wall time can be asked for again.
"""

NUM_PROCESSES = 2
"""Maximum number of concurrent checks. Each tenant has at most one. Each process contains the vocabulary."""

PAUSE = max(0.0, 20 / num_cpus() - 1)
"""Pause after a check that is long, or of a tenant that has recently used much time, as a multiple of its processor
time. Such checks therefore use at most a twentieth of the cores, because a busy core slows down the others.
"""

MAX_FULL = 1
"""Maximum number of concurrent second attempts."""

MEMORY_BYTES = 1 << 30
"""Limit on the additional memory of one check, in bytes."""

ANSWER_BYTES = 4 << 20
"""Longest compiled grammar, in bytes."""

MAX_KEPT = 512
"""Maximum number of cached outcomes over all tenants."""

MAX_KEPT_PER_TENANT = 32
"""Maximum number of cached outcomes per tenant."""

MAX_WAITING_PER_TENANT = 16
"""Maximum number of a tenant's requests that are waiting for a check or being checked."""

RETRY_S = 5.0

_WORKER = (sys.executable, "-P", "-m", "loramux.platform.grammars.worker")


class Checked(msgspec.Struct, frozen=True):
    grammar: str | None = None
    refused: str | None = None
    keywords: tuple[str, ...] = ()
    param: str | None = None
    """The invalid field, or None for the whole constraint."""


Observer = Callable[[str, float, tuple[str, ...]], None]
"""Called for each constraint with the outcome, the seconds spent waiting and checking, and the unsupported keywords.
The outcome is `accepted`, `refused`, or `known` if it was cached. Not called if the check itself fails.
"""


@dataclass(slots=True)
class _Check:
    """A check in the pool, its outcome, and the number of requests that wait for it."""

    asked: Future[Checked]
    outcome: asyncio.Future[Checked]
    num_requests: int = 0


class GrammarChecker:
    """Checks constraints in a forked, confined process with limits on time and memory.

    Outcomes are cached per tenant, so a fast answer reveals nothing about another tenant's constraints. Each tenant has
    one check at a time, and its equal requests share one. `ConfinedPool` bounds the time for which other tenants can
    delay a check. Not thread-safe: use it only from the event loop.
    """

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        observe: Observer = lambda *_: None,
        command: Sequence[str] = _WORKER,
        *,
        is_sandbox_required: bool = False,
    ) -> None:
        arguments = [str(model_dir.absolute()), str(vocab_size), *map(str, eos_token_ids)]
        if is_sandbox_required:
            arguments.append(REQUIRED)
        self._pool = ConfinedPool(
            (*command, *arguments),
            event="grammar_check_failed",
            num_processes=NUM_PROCESSES,
            max_full=MAX_FULL,
            quick=QUICK,
            full=FULL,
            max_waiting_per_tenant=MAX_WAITING_PER_TENANT,
            pause=PAUSE,
        )
        self._observe = observe
        # Guards the outcomes, which threads of the pool add.
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str, str], Checked] = OrderedDict()
        self._checks: dict[tuple[str, str, str], _Check] = {}

    async def grammar(self, tenant_id: str, constraint: Constraint) -> str:
        """Return the compiled grammar of the constraint. Raises InvalidRequest, RateLimited or Unavailable."""
        key = (tenant_id, constraint.kind, constraint.text)
        started_s = time.monotonic()
        checked = self._known(key)
        outcome = "known"
        if checked is None:
            checked = await self._checked(key, constraint)
            outcome = "refused" if checked.grammar is None else "accepted"
        self._observe(outcome, time.monotonic() - started_s, checked.keywords)
        if checked.grammar is None:
            raise InvalidRequest(
                checked.refused or "the grammar is refused",
                param=checked.param or constraint.param,
                code="grammar_refused",
            )
        return checked.grammar

    def preload(self) -> None:
        # As if of different tenants, so that all processes start.
        for index in range(NUM_PROCESSES):
            self._pool.submit(f"preload {index}", partial(_encoded, Constraint("regex", "a", "")), _decoded)

    def close(self) -> None:
        self._pool.close()

    async def _checked(self, key: tuple[str, str, str], constraint: Constraint) -> Checked:
        try:
            check = self._checks.get(key)
            if check is None:
                asked = self._pool.submit(key[0], partial(_encoded, constraint), partial(self._keep, key))
                check = self._checks[key] = _Check(asked, asyncio.wrap_future(asked))
            check.num_requests += 1
            try:
                return await asyncio.shield(check.outcome)
            finally:
                check.num_requests -= 1
                if not check.num_requests:
                    del self._checks[key]
                    # If all clients have gone, the check need not start.
                    check.asked.cancel()
        except TooManyWaiting:
            raise RateLimited(
                "this tenant already has too many new grammars waiting to be checked",
                code="too_many_grammars",
                retry_after_s=RETRY_S,
            ) from None
        except ForkServerFailed as error:
            raise Unavailable(
                "structured output is not available now", code="grammars_unavailable", retry_after_s=RETRY_S
            ) from error

    def _known(self, key: tuple[str, str, str]) -> Checked | None:
        with self._lock:
            checked = self._kept.get(key)
            if checked is not None:
                self._kept.move_to_end(key)
            return checked

    def _keep(self, key: tuple[str, str, str], ended: Ended) -> Checked:
        """Decode an outcome and keep it, even if all clients have gone."""
        checked = _decoded(ended)
        with self._lock:
            of_tenant = [one for one in self._kept if one[0] == key[0]]
            if len(of_tenant) >= MAX_KEPT_PER_TENANT:
                del self._kept[of_tenant[0]]
            elif len(self._kept) >= MAX_KEPT:
                self._kept.popitem(last=False)
            self._kept[key] = checked
        return checked


def _encoded(constraint: Constraint) -> bytes:
    request = {
        "kind": constraint.kind,
        "text": constraint.text,
        "cpu_s": CPU_S,
        "memory_bytes": MEMORY_BYTES,
        "file_bytes": ANSWER_BYTES,
    }
    return json.dumps(request).encode()


def _decoded(ended: Ended) -> Checked:
    checked = Checked()
    # If the stack overflowed, or memory or processor time ran out, a retry would fail in the same way.
    if ended.returncode == 0:
        with suppress(msgspec.MsgspecError):
            checked = msgspec.json.decode(ended.stdout, type=Checked)
    return checked if checked.grammar or checked.refused else Checked(refused="the grammar is too complex")
