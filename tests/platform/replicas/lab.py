"""Servers that share requests, in one process: real tables, certificates and connections; scripted engines."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from loramux.engine.protocol.messages import PROTOCOL, Add, Finished, SamplingParams, SequenceOutput
from loramux.migrations.database import Database
from loramux.platform.base_draw import BaseDraw
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.replicas.certificates import OwnCertificates
from loramux.platform.replicas.peer_listener import PeerListener
from loramux.platform.replicas.presence import Presence
from loramux.platform.replicas.records import ReplicaRow, base_fingerprint
from loramux.platform.replicas.replica_table import ReplicaTable
from loramux.platform.replicas.routed_engine import RoutedEngine
from loramux.platform.routing.views import NoReplica, Prefetch, ReplicaView, RoutingRequest
from loramux.platform.telemetry.metrics import GatewayMetrics
from loramux.platform.threads import call_on
from tests.platform.replicas.served_engine import ServedEngine
from tests.platform.scripted_engine import ScriptedEngine

PATIENCE_S = 60
PROMPTS = "f" * 64
"""The hash of the tokenizer and chat templates of each server's base."""


@dataclass
class ChosenRouter:
    """Chooses the first of `wanted` that is reported, else the first replica that is not draining."""

    wanted: list[str] = field(default_factory=list)
    views: Sequence[ReplicaView] = ()
    in_flight: list[str] = field(default_factory=list)

    def update(self, views: Sequence[ReplicaView]) -> None:
        self.views = views

    def choose(self, request: RoutingRequest) -> str:
        serving = [view.id for view in self.views if not view.is_draining]
        chosen = [name for name in self.wanted if name in serving] or serving
        if not chosen:
            raise NoReplica
        return chosen[0]

    def prefetches(self) -> Sequence[Prefetch]:
        return ()

    def note_started(self, replica_id: str, request: RoutingRequest) -> None:
        self.in_flight.append(replica_id)

    def note_ended(self, replica_id: str, request: RoutingRequest) -> None:
        self.in_flight.remove(replica_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    id: str
    scripted: ScriptedEngine
    served: ServedEngine
    engine: RoutedEngine
    router: ChosenRouter
    presence: Presence
    draw: BaseDraw
    listener: PeerListener
    metrics: GatewayMetrics

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def bound() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


def own_row(name: str, scripted: ScriptedEngine, **changes: Any) -> ReplicaRow:
    assert scripted.info is not None
    row = ReplicaRow(
        id=name,
        address="127.0.0.1:1",
        base=base_fingerprint(scripted.info),
        base_id=scripted.info.base_sha256,
        version="1",
        protocol=PROTOCOL,
        state="serving",
        beat=0,
        num_running=0,
        num_waiting=0,
        capacity=8,
        num_pages=64,
        num_free_pages=64,
        certificates="",
    )
    return msgspec.structs.replace(row, **changes)


@asynccontextmanager
async def open_replica(
    name: str,
    database: Database,
    threads: Executor,
    directory: Path,
    clock: Callable[[], float] = time.monotonic,
    base_id: str = "",
    version: str = "1",
) -> AsyncIterator[Replica]:
    scripted, metrics, router = ScriptedEngine(base_sha256=base_id), GatewayMetrics(), ChosenRouter()
    draw = BaseDraw(base_id, PROMPTS)
    served = ServedEngine(scripted, directory / f"{name}.sock")
    listening = bound()
    host, port = listening.getsockname()
    listener = PeerListener(listening, served, metrics.replicas.count_refusal)
    engine = RoutedEngine(
        scripted,
        name,
        chain([router], iter(ChosenRouter, None)).__next__,
        metrics.replicas.count_forwarded,
        metrics.replicas.base_fallbacks.inc,
        base_id=base_id,
        drawn_bases=lambda: draw.bases,
    )
    presence = Presence(
        own=own_row(name, scripted, address=f"{host}:{port}", version=version),
        table=ReplicaTable(database),
        certificates=OwnCertificates(name),
        local=scripted,
        engine=engine,
        draw=draw,
        listener=listener,
        metrics=metrics.replicas,
        call=partial(call_on, threads),
        strikes=CrashStrikes(clock),
        clock=clock,
    )
    listener.start()
    try:
        yield Replica(
            id=name,
            scripted=scripted,
            served=served,
            engine=engine,
            router=router,
            presence=presence,
            draw=draw,
            listener=listener,
            metrics=metrics,
        )
    finally:
        await presence.close()
        served.close()


@asynccontextmanager
async def two_replicas(
    database: Database, threads: Executor, directory: Path, base_ids: tuple[str, str] = ("", "")
) -> AsyncIterator[tuple[Replica, Replica]]:
    """Two connected servers. The first forwards its requests to the second until a test changes that.

    If their bases differ, requests must be divided between these bases.
    """
    async with (
        open_replica("rep_a", database, threads, directory, base_id=base_ids[0]) as first,
        open_replica("rep_b", database, threads, directory, base_id=base_ids[1]) as second,
    ):
        async with asyncio.timeout(PATIENCE_S):
            while any(replica.metric("loramux_peers", state="connected") < 1 for replica in (first, second)):
                await beat(first, second)
                await asyncio.sleep(0.02)
        first.router.wanted = [second.id]
        yield first, second


async def beat(*replicas: Replica) -> None:
    for replica in replicas:
        await replica.presence.beat()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110  other tasks set no event here
            await asyncio.sleep(0.01)


def add(name: str, max_tokens: int = 4, **more: Any) -> Add:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    return Add(sequence_id=name, prompt=(5, 6, 7), max_tokens=max_tokens, sampling=sampling, **more)


async def collect(stream: AsyncIterator[SequenceOutput | Finished]) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    async for item in stream:
        if isinstance(item, Finished):
            return tokens, item
        tokens.extend(item.token_ids)
    raise AssertionError("a stream ended without Finished")
