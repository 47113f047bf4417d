"""Checks constraints before they are admitted, so that no tenant's grammar reaches the engine unchecked."""

from __future__ import annotations

import json
import queue
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import structlog

from loramux.adapter_store.validation.fork_server import ForkServer, ForkServerFailed, last_line
from loramux.adapter_store.validation.validator import worker_environment
from loramux.platform.errors import InvalidRequest, RateLimited, Unavailable
from loramux.platform.grammars.constraint import Constraint
from loramux.platform.threads import call_on
from loramux.platform.turns import TenantTurns

CPU_S = 1
"""Limit on a check's processor time, in seconds. A 20 kB schema takes about 33 ms."""

WALL_S = 5.0
"""Limit on a check's wall time, in seconds. A check has a lower priority than the engine and the gateway."""

NUM_PROCESSES = 2
"""Maximum number of concurrent checks. Each tenant has at most one."""

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

NICENESS = 5
"""Niceness of a check, so that the engine and the gateway go first."""

RETRY_S = 5.0

_WORKER = (sys.executable, "-P", "-m", "loramux.platform.grammars.worker")

log = structlog.get_logger(__name__)


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


class GrammarChecker:
    """Checks constraints in a forked, confined process with limits on time and memory.

    Outcomes are cached per tenant, so a fast answer reveals nothing about another tenant's constraints. Each tenant has
    one check at a time. Its other requests wait, without delaying other tenants. Not thread-safe: use it only from the
    event loop.
    """

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        observe: Observer = lambda *_: None,
        command: Sequence[str] = _WORKER,
    ) -> None:
        arguments = (str(model_dir.absolute()), str(vocab_size), *map(str, eos_token_ids))
        self._all = [ForkServer((*command, *arguments), worker_environment(), NICENESS) for _ in range(NUM_PROCESSES)]
        self._idle: queue.SimpleQueue[ForkServer] = queue.SimpleQueue()
        for processes in self._all:
            self._idle.put(processes)
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="grammars")
        self._observe = observe
        self._kept: OrderedDict[tuple[str, str, str], Checked] = OrderedDict()
        self._turns = TenantTurns(MAX_WAITING_PER_TENANT, _too_many_waiting)

    async def grammar(self, tenant_id: str, constraint: Constraint) -> str:
        """Return the compiled grammar of the constraint. Raises InvalidRequest, RateLimited or Unavailable."""
        key = (tenant_id, constraint.kind, constraint.text)
        started_s = time.monotonic()
        checked = self._kept.get(key)
        outcome = "known"
        if checked is None:
            checked = await self._turns.run(tenant_id, lambda: self._checked(key, constraint))
            outcome = "refused" if checked.grammar is None else "accepted"
        else:
            self._kept.move_to_end(key)
        self._observe(outcome, time.monotonic() - started_s, checked.keywords)
        if checked.grammar is None:
            raise InvalidRequest(
                checked.refused or "the grammar is refused",
                param=checked.param or constraint.param,
                code="grammar_refused",
            )
        return checked.grammar

    def preload(self) -> None:
        for _ in range(NUM_PROCESSES):
            self._threads.submit(self._check, Constraint("regex", "a", ""))

    def close(self) -> None:
        for processes in self._all:
            processes.close()
        self._threads.shutdown(cancel_futures=True)

    async def _checked(self, key: tuple[str, str, str], constraint: Constraint) -> Checked:
        # Another request may have checked the same constraint while this one waited.
        checked = self._kept.get(key)
        if checked is None:
            checked = await call_on(self._threads, self._check, constraint)
            self._keep(key, checked)
        return checked

    def _keep(self, key: tuple[str, str, str], checked: Checked) -> None:
        of_tenant = [one for one in self._kept if one[0] == key[0]]
        if len(of_tenant) >= MAX_KEPT_PER_TENANT:
            del self._kept[of_tenant[0]]
        elif len(self._kept) >= MAX_KEPT:
            self._kept.popitem(last=False)
        self._kept[key] = checked

    def _check(self, constraint: Constraint) -> Checked:
        """Blocking. Raises Unavailable if no process can be started."""
        request = {
            "kind": constraint.kind,
            "text": constraint.text,
            "cpu_s": CPU_S,
            "memory_bytes": MEMORY_BYTES,
            "file_bytes": ANSWER_BYTES,
        }
        processes = self._idle.get()
        try:
            ended = processes.run(json.dumps(request).encode(), WALL_S)
        except ForkServerFailed as error:
            log.warning("grammar_check_failed", error=str(error))
            raise Unavailable(
                "structured output is not available now", code="grammars_unavailable", retry_after_s=RETRY_S
            ) from error
        finally:
            self._idle.put(processes)
        if ended.returncode > 0:
            log.warning("grammar_check_failed", error=last_line(ended.stderr))
        if ended.took_too_long or ended.returncode != 0:
            # The stack overflowed, or memory or time ran out. A retry would fail in the same way.
            return Checked(refused="the grammar is too complex")
        try:
            checked = msgspec.json.decode(ended.stdout, type=Checked)
        except msgspec.MsgspecError:
            checked = Checked()
        return checked if checked.grammar or checked.refused else Checked(refused="the grammar is too complex")


def _too_many_waiting() -> RateLimited:
    return RateLimited(
        "this tenant already has too many new grammars waiting to be checked",
        code="too_many_grammars",
        retry_after_s=RETRY_S,
    )
