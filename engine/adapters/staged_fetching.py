"""Bringing packed adapters into host memory by the staging process."""

from __future__ import annotations

from collections.abc import Callable, Collection

from loramux.adapter_store.tiers.host_store import HostStore
from loramux.adapter_store.tiers.staging import StagedAdapter, StagingProcess
from loramux.adapter_store.tiers.tier_contents import TierContents
from loramux.engine.adapters.adapter_fetching import Outcome


class StagedFetcher:
    """Takes adapters from host memory where they are there, else has the staging process put them there.

    No thread of this process works for it: a thread takes the interpreter's lock after each of its system calls, an S3
    client for milliseconds at a time, and a step that finds the lock taken sleeps until it is woken, which takes a
    tenth of a millisecond. `wake` is called where there is an outcome that nothing else tells of.
    """

    def __init__(self, staging: StagingProcess, host: HostStore, num_at_once: int, wake: Callable[[], None]) -> None:
        self._staging = staging
        self._host = host
        self._num_at_once = num_at_once
        self._wake = wake
        # Fetches that nobody has cancelled, by the number of their staging; None where host memory had it.
        self._fetches: dict[str, int | None] = {}
        self._found: dict[str, Outcome] = {}

    def fetch(self, digest: str) -> None:
        lease = self._host.lease(digest)
        if lease is not None:
            self._fetches[digest] = None
            self._found[digest] = Outcome(digest, lease)
            self._wake()
            return
        self._expect(1)
        self._fetches[digest] = self._staging.stage(digest)
        if self._staging.has_outcomes:
            self._wake()

    def cancel(self, digest: str) -> None:
        number = self._fetches.pop(digest)
        if number is not None:
            self._staging.cancel(number)
            self._expect(0)
        else:
            lease = self._found.pop(digest).lease
            assert lease is not None
            lease.release()

    def outcomes(self) -> list[Outcome]:
        found, self._found = [*self._found.values()], {}
        for result in found:
            del self._fetches[result.digest]
        for outcome in self._staging.outcomes():
            digest = outcome.digest
            assert self._fetches[digest] == outcome.number
            del self._fetches[digest]
            self._expect(0)
            if isinstance(outcome, StagedAdapter):
                found.append(Outcome(digest, self._host.add(outcome.packed)))
            else:
                found.append(Outcome(digest, None, outcome.message))
        return found

    def contents(self) -> tuple[TierContents, ...]:
        disk = self._staging.contents
        return (self._host.contents(),) if disk is None else (self._host.contents(), disk)

    def look(self, then: Callable[[], None]) -> None:
        self._staging.look(then)

    def protect(self, group: str, digests: Collection[str], floor_bytes: int) -> None:
        self._host.protect(group, digests, floor_bytes)

    def fileno(self) -> int:
        return self._staging.fileno()

    def attend(self) -> None:
        self._staging.receive()
        self._staging.answer_looks()

    def close(self) -> None:
        self._staging.close()
        for outcome in self._found.values():
            assert outcome.lease is not None
            outcome.lease.release()
        self._found.clear()
        self._fetches.clear()

    def _expect(self, num_more: int) -> None:
        num_staged = sum(number is not None for number in self._fetches.values())
        self._host.expect(min(num_staged + num_more, self._num_at_once))
