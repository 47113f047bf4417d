"""Messages between a gateway and its link process, which is the process that uses Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

LENGTH_BYTES = 4


class Join(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message to a link process: join the cluster, and use this application of Ray Serve."""

    address: str
    app: str


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers Join. `failure` says in one sentence why the cluster cannot be used; the link process then ends."""

    failure: str | None = None


class OpenSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: int
    replica_id: str
    session_id: str


class SendBytes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: int
    replica_id: str
    session_id: str
    offset: int
    data: bytes


class CancelCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: int


class KeepReplicas(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    replica_ids: tuple[str, ...]


class Received(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bytes that a replica sent in the session that `call_id` opened."""

    call_id: int
    data: bytes


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a call. `failure` is None if it succeeded."""

    call_id: int
    failure: str | None = None


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    identity: dict[str, Any]
    state: dict[str, Any]


class Replicas(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The replicas that accept requests, whenever they or their reports have changed."""

    replicas: tuple[Replica, ...]


ToLink = Join | OpenSession | SendBytes | CancelCall | KeepReplicas
FromLink = Joined | Received | Ended | Replicas

_encoder = msgspec.msgpack.Encoder()


def write_message(writer: asyncio.StreamWriter, message: ToLink | FromLink) -> None:
    data = _encoder.encode(message)
    writer.write(len(data).to_bytes(LENGTH_BYTES) + data)


async def read_message(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    """Raises IncompleteReadError at the end of the stream."""
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
    return decoder.decode(await reader.readexactly(size))
