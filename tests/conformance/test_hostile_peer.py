"""Servers that share requests with a server that has a valid certificate, lies, and replays others' messages."""

from __future__ import annotations

import asyncio
import random
import ssl
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from importlib.metadata import version
from itertools import product
from pathlib import Path

import msgspec
import pytest

from loramux.engine.protocol.messages import Abort, Add, Credit, Extend, SamplingParams, ToEngine
from loramux.platform.engine_link.engine_session import INITIAL_CREDIT
from loramux.platform.quotas.policies import QuotaPolicies
from loramux.platform.replicas.certificates import tls_context
from loramux.platform.replicas.frame_link import FrameLink
from loramux.platform.replicas.replica_table import ReplicaTable, Summary
from loramux.platform.replicas.residency import summarise
from tests.conformance.drawn_requests import LAB_ADAPTERS
from tests.conformance.fleet_lab import FleetLab
from tests.conformance.fleet_streams import Stream, is_billed_as_received, numbered_stream, send_stream
from tests.conformance.gateway_lab import LabGateway, make_lab_base
from tests.platform.ready_adapters import digest_of
from tests.platform.replicas.lab import Replica, open_replica
from tests.platform.replicas.lies import LIES
from tests.postgres import create_database

NUM_STREAMS = 16
PATIENCE_S = 60.0

pytestmark = [pytest.mark.campaign, pytest.mark.fleet]


@pytest.fixture(scope="module")
def lab(postgres_server: str, demo_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetLab]:
    model = make_lab_base(tmp_path_factory.mktemp("base"), demo_base)
    url = create_database(postgres_server, "hostile_peer")
    with (
        tempfile.TemporaryDirectory(prefix="loramux-lab-") as directory,
        closing(FleetLab(Path(directory), url, model, 2)) as lab,
    ):
        yield lab


@asynccontextmanager
async def hostile_replica(lab: FleetLab, name: str) -> AsyncIterator[Replica]:
    """A server in this process that the servers of the lab have accepted. Its engine repeats the prompt."""
    with ThreadPoolExecutor(2) as threads, tempfile.TemporaryDirectory(prefix="loramux-lab-") as directory:
        async with open_replica(
            name, lab.database, threads, Path(directory), base_id=lab.base_id, version=version("loramux")
        ) as replica:
            replica.presence.start(asyncio.Event())
            async with asyncio.timeout(PATIENCE_S):
                while await asyncio.to_thread(num_connected, lab) < 2 * len(lab.gateways):  # noqa: ASYNC110  other processes
                    await asyncio.sleep(0.1)
            yield replica


def num_connected(lab: FleetLab) -> float:
    return sum(lab.metric(gateway, 'loramux_peers{state="connected"}') for gateway in lab.gateways)


def account(lab: FleetLab, name: str) -> tuple[str, str]:
    tenant, key = lab.account(name)
    QuotaPolicies(lab.database).set(tenant.id, "tokens_per_minute", 10**9)
    return tenant.id, key


async def streams(lab: FleetLab, key: str, dice: random.Random, number: int = NUM_STREAMS) -> list[Stream]:
    requests = [numbered_stream(dice, dice.choice(("base", "plain", "caller", "quiet"))) for _ in range(number)]
    sending = [send_stream(lab.gateways[i % 2], key, request) for i, request in enumerate(requests)]
    return list(await asyncio.gather(*sending))


def check(lab: FleetLab, tenant_id: str, sent: list[Stream]) -> None:
    """Each stream is complete, or ended by an error. Each is billed as its client received it."""
    lab.wait_settled()
    lab.check_bills(tenant_id, [(one.status, one.answer) for one in sent])
    events = lab.events_of(tenant_id)
    # A refusal before the first token has its own status.
    assert {one.status for one in sent} <= {200, 503}, Counter(one.status for one in sent)
    unkept = [one for one in sent if not one.is_complete and not one.is_ended_by_error]
    assert unkept == []
    assert [one for one in sent if one.status == 200 and not is_billed_as_received(one, events)] == []
    assert all(Path(f"/proc/{gateway.pid}").exists() for gateway in lab.gateways)


def test_server_that_lies_about_sequences_adapters_and_load_changes_no_bill(lab: FleetLab) -> None:
    tenant_id, key = account(lab, "lied-to")
    dice = random.Random(1)
    sent: list[Stream] = []

    async def run() -> None:
        claims = summarise([*map(digest_of, LAB_ADAPTERS), *(digest_of(str(i)) for i in range(4000))])
        publish = ReplicaTable(lab.database).publish
        # A server that has lied is not used for a while, so each lie needs another server.
        for number, (name, lie) in enumerate(LIES.items()):
            async with hostile_replica(lab, f"rep_liar{number}") as liar:
                liar.served.rewrite = lie
                row = msgspec.structs.replace(liar.presence._own.row, capacity=(1 << 31) - 1)
                await asyncio.to_thread(publish, row, Summary(version=10**6, prefixes=claims), True)
                await asyncio.sleep(1.5)
                found = await streams(lab, key, dice)
                sent.extend(found)
                num_complete = sum(one.is_complete for one in found)
                print(f"{name}: {len(liar.scripted.adds)} sequences on the liar, {num_complete} streams complete")
                assert liar.scripted.adds, "no sequence reached the liar"

    asyncio.run(run())
    check(lab, tenant_id, sent)
    # Without the liar, everything completes again.
    later = asyncio.run(streams(lab, key, dice))
    assert all(one.is_complete for one in later)


class Replayer:
    """Connections with the certificate of an accepted server, over which the test sends whatever it likes."""

    def __init__(self, hostile: Replica, gateway: LabGateway) -> None:
        self._hostile = hostile
        self._gateway = gateway
        self._encoder = msgspec.msgpack.Encoder()

    async def send(self, data: bytes, wait_s: float = 0.5, then_close: bool = False) -> str:
        """Send bytes on a new connection. Return why it ended, or "" if it is open after `wait_s`."""
        link, transport = await self._connected()
        try:
            transport.write(data)
            if then_close:
                return "closed"
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    return await asyncio.shield(link.lost)
            return ""
        finally:
            transport.abort()

    async def _connected(self) -> tuple[FrameLink, asyncio.Transport]:
        """Connect as a gateway does. A server accepts only two connections at once from another."""
        address = self._gateway.settings["peer_address"]
        peers = self._hostile.presence._book.peers.values()
        peer = next(one for one in peers if one.row.address == address)
        context = tls_context(ssl.PROTOCOL_TLS_CLIENT, self._hostile.presence._certificates.in_use, peer.certificates)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                ready = asyncio.Event()
                link = FrameLink(lambda frame, ready=ready: ready.set())
                with suppress(OSError):
                    transport, _ = await asyncio.get_running_loop().create_connection(
                        lambda link=link: link, *peer.row.host_and_port, ssl=context
                    )
                    transport.write(self.framed(Credit(count=INITIAL_CREDIT)))
                    waiting = asyncio.create_task(ready.wait())
                    await asyncio.wait((waiting, link.lost), return_when=asyncio.FIRST_COMPLETED)
                    if waiting.done():
                        return link, transport
                    waiting.cancel()
                    transport.abort()
                await asyncio.sleep(0.05)

    def framed(self, *messages: ToEngine) -> bytes:
        frames = [self._encoder.encode(message) for message in messages]
        return b"".join(len(frame).to_bytes(4) + frame for frame in frames)


Frames = Callable[[Replayer, str], bytes]


def one(sequence_id: str) -> Add:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    return Add(sequence_id=sequence_id, prompt=(5, 6, 7), max_tokens=20, sampling=sampling)


def aborts(replayer: Replayer, name: str) -> bytes:
    return replayer.framed(Abort(sequence_id=name), Abort(sequence_id=name))  # type: ignore[call-arg]


def extensions(replayer: Replayer, name: str) -> bytes:
    return replayer.framed(Extend(sequence_id=name, max_tokens=900))


def another_sequence(replayer: Replayer, name: str) -> bytes:
    return replayer.framed(one(name))


def extension_first(replayer: Replayer, name: str) -> bytes:
    return replayer.framed(Extend(sequence_id="x", max_tokens=9), Abort(sequence_id="x"), one("x"))


def sequence_twice(replayer: Replayer, name: str) -> bytes:
    return replayer.framed(one(name), one(name))


def credit_twice(replayer: Replayer, name: str) -> bytes:
    return replayer.framed(Credit(count=INITIAL_CREDIT))


REPLAYED: dict[str, tuple[Frames, bool]] = {
    "aborts of others' sequences": (aborts, True),
    "extensions of others' sequences": (extensions, True),
    "a sequence with another's id": (another_sequence, True),
    "an extension before its sequence": (extension_first, True),
    "a sequence twice": (sequence_twice, False),
    "credit twice": (credit_twice, False),
    "an unknown message": (lambda replayer, name: (11).to_bytes(4) + b"\x81\xa4type\xa4Quit", False),
    "an oversized frame": (lambda replayer, name: b"\x7f\xff\xff\xff", False),
    "a frame of the largest size": (lambda replayer, name: (16 << 20).to_bytes(4) + bytes(16 << 20), False),
    "a truncated frame": (lambda replayer, name: replayer.framed(one(name))[:-3], True),
    "nested arrays": (lambda replayer, name: (4096).to_bytes(4) + b"\x91" * 4096, False),
}
"""The frames, and whether the connection stays open."""


def test_replayed_frames_change_no_other_sequence(lab: FleetLab) -> None:
    tenant_id, key = account(lab, "replayed")
    dice = random.Random(2)
    sent: list[Stream] = []

    async def run() -> None:
        async with hostile_replica(lab, "rep_replayer") as hostile:
            # It replays, but gets no sequences of its own.
            hostile.presence.drain()
            for (name, (frames, stays)), gateway in product(REPLAYED.items(), lab.gateways):
                replayer = Replayer(hostile, gateway)
                since = lab.outputs_of(gateway).stat().st_size
                sending = asyncio.create_task(streams(lab, key, dice))
                running: list[str] = []
                async with asyncio.timeout(PATIENCE_S):
                    while len(running) < 4:
                        await asyncio.sleep(0.02)
                        lines = lab.outputs_of(gateway).read_text()[since:].splitlines()
                        running = [line.split()[1] for line in lines if line.endswith(" 1")]
                for sequence_id in dict.fromkeys(running):
                    reason = await replayer.send(frames(replayer, sequence_id), 0.5 if stays else PATIENCE_S)
                    assert (reason == "") == stays, (name, reason)
                    await replayer.send(frames(replayer, sequence_id), then_close=True)
                found = await sending
                sent.extend(found)
                assert all(one.is_complete for one in found), name

    asyncio.run(run())
    check(lab, tenant_id, sent)
    print(f"{len(sent)} streams beside {len(REPLAYED)} kinds of replayed frames, all complete")
