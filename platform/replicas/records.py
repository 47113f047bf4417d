"""The row that a server publishes about itself in the table `replicas`."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec

from loramux.engine.protocol.messages import EngineReady

MAX_CERTIFICATES_CHARS = 8192
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table `replicas`. The constraints are checked when another server's row is read."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=40)]
    address: Annotated[str, msgspec.Meta(pattern=r"^.{1,253}:[0-9]{1,5}$")]
    base: Annotated[str, msgspec.Meta(max_length=64)]
    base_id: Annotated[str, msgspec.Meta(max_length=64)] | None
    version: Annotated[str, msgspec.Meta(max_length=40)]
    protocol: Count
    state: Literal["serving", "draining"]
    beat: Annotated[int, msgspec.Meta(ge=0)]
    num_running: Count
    num_waiting: Count
    capacity: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    num_pages: Count
    num_free_pages: Count
    certificates: Annotated[str, msgspec.Meta(max_length=MAX_CERTIFICATES_CHARS)]

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def pages_free_fraction(self) -> float:
        return min(1.0, self.num_free_pages / self.num_pages) if self.num_pages else 0.0


def base_fingerprint(ready: EngineReady) -> str:
    """Return a hash that is equal for engines with the same model, dtype, quantisation and page size."""
    parts = (ready.base_sha256, ready.dtype, ready.quantization, ready.page_tokens)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
