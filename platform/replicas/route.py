"""Tracks where a sequence runs, and describes the sequence to a router."""

from __future__ import annotations

import hashlib
from array import array

import msgspec

from loramux.engine.protocol.messages import Add
from loramux.platform.base_draw import BaseOrder
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.replicas.base_replicas import BaseReplicas
from loramux.platform.routing.views import RoutingRequest

PREFIX_TOKENS = 64
"""Prompts that start with this many identical tokens probably share cached pages."""


class Route:
    """The replica that runs one sequence, and the record of its moves."""

    def __init__(self, add: Add, order: BaseOrder | None) -> None:
        self.add = add
        self.order = order
        self.request = routing_request(add)
        self.base: BaseReplicas | None = None
        self.replica_id = ""
        self.engine: EngineClient | None = None
        self.max_tokens = add.max_tokens
        self.has_started = False
        self.is_aborted = False
        self.num_losses = 0
        self.overloaded_ids: set[str] = set()
        self.has_moved = False
        self.has_fallen_back = False

    def add_now(self) -> Add:
        """Return the Add message with the sequence's current limit."""
        return msgspec.structs.replace(self.add, max_tokens=self.max_tokens) if self.has_moved else self.add


def routing_request(add: Add) -> RoutingRequest:
    prefix_key = None
    if add.isolation_key and len(add.prompt) >= PREFIX_TOKENS:
        start = array("q", add.prompt[:PREFIX_TOKENS]).tobytes()
        prefix_key = hashlib.blake2b(start, digest_size=16, key=add.isolation_key[:64]).digest()
    return RoutingRequest(
        digest=add.digest,
        prefix_key=prefix_key,
        # The lines of batches do not use up the part of the tenant's other requests.
        share_key=f"{add.share_key} in the background" if add.is_background else add.share_key,
        weight=add.weight,
        num_prompt_tokens=len(add.prompt),
        max_tokens=add.max_tokens,
    )
