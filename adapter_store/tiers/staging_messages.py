"""Messages between an engine and its staging process, encoded with msgpack, one per packet."""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from loramux.adapter_store.tiers.tier_contents import TierContents
from loramux.adapter_store.tiers.tier_figures import LoadCounts, PassedStage
from loramux.kernels.layout import RowCounts

MAX_PACKET_BYTES = 64 << 10
MAX_TABLE_BYTES = 32 << 10
"""Longest compressed tables in a packet, in bytes. Only adapters with thousands of experts of many different ranks or
scales have longer ones.
"""

MAX_MESSAGE_CHARS = 2000
"""Longest failure message, in characters."""

MAX_PIECES = 1000
"""Maximum number of pieces in one packet."""


class StagingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The first packet: where to load adapters from, and how to pack them."""

    blob_url: str
    disk_dir: str
    disk_bytes: int
    target: dict[str, Any]
    """The output of `PackTarget.document()`."""
    model_dir: str
    quantized_dir: str | None
    """Directory of quantised weights that replace some of the model's weights, or None."""
    num_threads: int


class Occupied(msgspec.Struct, frozen=True, tag=True):
    """Pieces of the shared memory that an earlier staging process allocated: the offset and length of each, in bytes.

    Sent before any other request. The engine releases these pieces with Release, like all other pieces.
    """

    pieces: tuple[tuple[int, int], ...]


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter into the shared memory. The answer is one Staged or Failed with the same number."""

    number: int
    digest: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancel a Stage request. The process still answers the request."""

    number: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """The pieces at these offsets in the shared memory are no longer in use."""

    begins: tuple[int, ...]


class Look(msgspec.Struct, frozen=True, tag=True):
    """Request the disk tier's contents. The answer is Looked."""


class Purge(msgspec.Struct, frozen=True, tag=True):
    """Delete an adapter's files from the disk tier. The answer is Purged."""

    digest: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Ask for a Pong, which is sent immediately, even during fetches."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The tiers are open."""

    counts: msgspec.Raw


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The tiers cannot be opened, and the process exits. `message` states the problem."""

    message: str


class Staged(msgspec.Struct, frozen=True, tag=True):
    """The adapter's pages begin at offset `begin` of the shared memory, and stay there until the engine releases them.

    If they did not fit, `begin` is None and the packet carries the descriptor of separate memory with only these pages.
    Ranks and scales are int32 and float32, as in `PackedAdapter`. `tables` contains the layers' ranks and scales,
    compressed. If the compressed tables are too long for a packet, `tables` is empty, `begin` is None, and the tables
    follow the pages in separate memory, uncompressed.
    """

    number: int
    begin: int | None
    tables: bytes
    outer_ranks: bytes
    outer_scales: bytes
    has_affines: bool
    rows: RowCounts
    stages: tuple[PassedStage, ...]
    counts: msgspec.Raw
    """The process's LoadCounts, which the engine decodes only on demand."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The adapter could not be loaded, or the request was cancelled."""

    number: int
    message: str
    stages: tuple[PassedStage, ...]
    counts: msgspec.Raw


class Looked(msgspec.Struct, frozen=True, tag=True):
    """The packet carries a descriptor of memory with the encoded TierContents, because they may not fit in a packet.

    Without a descriptor, the contents are unavailable.
    """

    counts: msgspec.Raw


class Purged(msgspec.Struct, frozen=True, tag=True):
    """The adapter's files are deleted, or cannot be."""

    digest: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The process is alive."""


ToStaging = Occupied | Stage | Cancel | Release | Look | Purge | Ping
FromStaging = Opened | Refused | Staged | Failed | Looked | Purged | Pong

_config_decoder = msgspec.msgpack.Decoder(StagingConfig)
_to_decoder = msgspec.msgpack.Decoder(ToStaging)
_from_decoder = msgspec.msgpack.Decoder(FromStaging)
_encoder = msgspec.msgpack.Encoder()

encode = _encoder.encode
decode_config = _config_decoder.decode
decode_to_staging = _to_decoder.decode
decode_from_staging = _from_decoder.decode
decode_counts = msgspec.msgpack.Decoder(LoadCounts).decode
decode_contents = msgspec.msgpack.Decoder(TierContents).decode


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Create two connected sockets that preserve packet boundaries and order, and report that the peer is gone."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
