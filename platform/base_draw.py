"""Draws the base that runs a request, in proportion to the weights that divide requests between bases."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Clients of engines import this module, also in processes that use no database.
    from loramux.adapter_store.registry.base_shares import BaseShare


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseOrder:
    """The bases whose servers may run a request, the preferred one first.

    `drawn` is the base that the weights chose, even if none of its servers can run the request. `own` is this server's
    base.
    """

    drawn: str
    bases: tuple[str, ...]
    own: str

    def among(self, bases: Collection[str]) -> BaseOrder:
        return replace(self, bases=tuple(base for base in self.bases if base in bases))

    @property
    def other(self) -> str | None:
        """The preferred base, or None if it is this server's own base."""
        return None if self.bases[0] == self.own else self.bases[0]


class BaseDraw:
    """The weights of the bases, and the bases with a live server, as this server last read them.

    Without a weight for its own base, a server runs requests only on its own base. Bases whose tokenizer or chat
    templates differ from this server's are excluded, because servers forward token ids. Thread-safe: `note_shares` and
    `note_live` replace whole values.
    """

    def __init__(self, own: str, prompt_sha256: str | None) -> None:
        self.own = own
        self._prompt_sha256 = prompt_sha256
        self._weights: Mapping[str, int] = {}
        self._live: Collection[str] = ()

    def note_shares(self, shares: Iterable[BaseShare]) -> None:
        alike = {share.base_id: share.weight for share in shares if share.prompt_sha256 == self._prompt_sha256}
        self._weights = alike if self.own in alike and len(alike) > 1 else {}

    def note_live(self, bases: Collection[str]) -> None:
        """Note the bases that have at least one server that accepts requests."""
        self._live = bases

    @property
    def bases(self) -> Sequence[str]:
        """The bases that requests are divided between, or () if requests are not divided."""
        return tuple(self._weights)

    def order(self, tenant_id: str, adapter_id: str | None) -> BaseOrder | None:
        """Return the order for a tenant's requests to an adapter, or to the base if `adapter_id` is None.

        Among bases with a live server, the order depends only on these identifiers and the weights, so prompts that
        share a prefix find it cached, and a conversation stays on one base. Bases without a live server come last. None
        means that requests are not divided.
        """
        weights, live_bases = self._weights, self._live
        if not weights:
            return None
        drawn = drawn_order(weights, f"{tenant_id}:{adapter_id or ''}")
        live = [base for base in drawn if base in live_bases]
        return BaseOrder(drawn=drawn[0], bases=(*live, *(base for base in drawn if base not in live)), own=self.own)


def drawn_order(weights: Mapping[str, int], key: str) -> Sequence[str]:
    """Order the bases by weighted rendezvous hashing: each comes first with a probability proportional to its weight.

    The rest are ordered as if they were drawn without the first. Bases with weight 0 come last. If one weight grows,
    the first base for a key either stays the same or becomes the base with that weight.
    """

    def distance(base: str) -> tuple[float, int]:
        # Uniform in (0, 1), so that -log is exponentially distributed. Each base therefore has the smallest -log/weight
        # with a probability proportional to its weight.
        number = int.from_bytes(hashlib.sha256(f"{base}:{key}".encode()).digest()[:8])
        weight = weights[base]
        return (-math.log((number + 0.5) / 2**64) / weight if weight else math.inf), number

    return sorted(weights, key=distance)
