"""What an engine and its staging process say to each other: msgpack, one record a packet of their socket."""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from loramux.adapter_store.tiers.tier_contents import TierContents
from loramux.adapter_store.tiers.tier_figures import LoadCounts, PassedStage

MAX_PACKET_BYTES = 64 << 10
MAX_MESSAGE_CHARS = 2000
"""Of what is said of a failure."""

MAX_PIECES = 1000
"""Pieces that one packet names."""


class StagingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The first packet: where adapters come from, and for what they are packed."""

    blob_url: str
    disk_dir: str
    disk_bytes: int
    target: dict[str, Any]
    """A `PackTarget.document()`."""
    num_threads: int


class Occupied(msgspec.Struct, frozen=True, tag=True):
    """Pieces of the shared memory that a process before this one gave out: begin and length in bytes of each.

    They come before anything else, and are given back like any others.
    """

    pieces: tuple[tuple[int, int], ...]


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Bring the adapter into the shared memory; answered by one Staged or Failed of the same number."""

    number: int
    digest: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this any more; it is answered all the same."""

    number: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """The pieces of the shared memory that begin there are no longer used."""

    begins: tuple[int, ...]


class Look(msgspec.Struct, frozen=True, tag=True):
    """Say what the disk tier holds; answered by Looked."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by Pong at once, whatever is being fetched."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The tiers can be used."""

    counts: msgspec.Raw


class Refused(msgspec.Struct, frozen=True, tag=True):
    """They cannot, and the process ends; `message` says how to mend it."""

    message: str


class Staged(msgspec.Struct, frozen=True, tag=True):
    """The adapter's pages lie in the shared memory from `begin` on, and stay until they are given back.

    Where that had no room, `begin` is None, and with the packet comes the descriptor of memory that holds nothing else.
    Tables are as in `PackedAdapter`: int32 ranks and float32 scales.
    """

    number: int
    begin: int | None
    ranks: bytes
    outer_ranks: bytes
    scales: bytes
    outer_scales: bytes
    stages: tuple[PassedStage, ...]
    counts: msgspec.Raw
    """LoadCounts of the whole process, which the engine reads when it is asked."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The adapter cannot be had, or was cancelled."""

    number: int
    message: str
    stages: tuple[PassedStage, ...]
    counts: msgspec.Raw


class Looked(msgspec.Struct, frozen=True, tag=True):
    """With the packet comes the descriptor of memory that holds the TierContents, too long for a packet.

    Without one they cannot be told.
    """

    counts: msgspec.Raw


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The process runs."""


ToStaging = Occupied | Stage | Cancel | Release | Look | Ping
FromStaging = Opened | Refused | Staged | Failed | Looked | Pong

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
    """Two ends that keep packets whole and in order, and notice when the other one is gone."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
