"""Servers with valid certificates that lie: about sequences, adapters, load, and other servers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from loramux.engine.protocol.messages import (
    AdapterState,
    FromEngine,
    ResidentAdapter,
    SequenceOutput,
    Stats,
    StepOutput,
)
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.replicas import peer_engine, presence
from loramux.platform.replicas.records import ReplicaRow
from loramux.platform.replicas.replica_table import ReplicaTable, Summary
from loramux.platform.replicas.residency import summarise
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.ready_adapters import digest_of
from tests.platform.replicas.lab import PATIENCE_S, add, beat, collect, open_replica, until
from tests.platform.replicas.lies import LIES, Lie
from tests.platform.replicas.pair import Pair, open_pair
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

NUM_PROMPT = 4
"""Number of tokens of the prompt that a pair completes."""


@pytest.fixture
async def pair(
    accounts: Database,
    tokenizer: ModelTokenizer,
    threads: ThreadPoolExecutor,
    short_path: Path,
    anyio_backend: object,
) -> AsyncIterator[Pair]:
    async with open_pair(accounts, tokenizer, threads, short_path) as pair:
        pair.gateway.limit("tokens_per_month", 10**6)
        yield pair


def num_reserved(pair: Pair) -> int:
    with pair.gateway.database.read() as connection:
        return sum(
            connection.execute(
                schema.quota_counters.select().with_only_columns(schema.quota_counters.c.reserved)
            ).scalars()
        )


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_lies_about_a_sequence_end_the_connection_and_are_not_billed(pair: Pair, lie: Lie) -> None:
    pair.second.served.rewrite = lie
    answer = await pair.complete()
    # A sequence that had no output yet runs on the first server; otherwise its client gets an error.
    assert (answer["status"], answer.get("error", {}).get("code")) in ((200, None), (503, "engine_unavailable"))
    assert len(pair.second.scripted.adds) == 1
    [(_, _, num_prompt, num_completion, num_cached)] = pair.bills()
    assert (num_prompt, num_cached) == (NUM_PROMPT, 0)
    assert 0 <= num_completion <= 8
    assert num_reserved(pair) == 0
    if answer["status"] == 200:
        assert num_completion == answer["usage"]["completion_tokens"] == 8
    # The next request runs on the first server, because the liar is not used for a while.
    assert (await pair.complete())["status"] == 200
    assert len(pair.second.scripted.adds) == 1
    assert pair.first.metric("loramux_replica_refusals_total", reason="answers") == 1


async def test_honest_ends_are_not_taken_for_lies(pair: Pair) -> None:
    scripts = {
        "stop": Script(token_ids=(5,) * 3, stop_token_id=1),
        "error": Script(token_ids=(5,) * 3, error="adapter_quarantined"),
        "cached": Script(token_ids=(5,) * 8, cached_tokens=3),
        "at once": Script(token_ids=(5,) * 8, tokens_per_output=8),
    }
    for script in scripts.values():
        pair.second.scripted.script = lambda add, script=script: script
        answer = await pair.complete(logprobs=2)
        assert answer["status"] in (200, 400), answer
    assert len(pair.second.scripted.adds) == len(scripts)
    assert pair.first.metric("loramux_forwarded_sequences_total", outcome="lost") == 0


async def test_scores_and_the_first_token_of_one_step_are_no_lie(pair: Pair) -> None:
    """An engine sends a prompt's last scores and the first token, which one step computed, in one message."""
    scores: list[SequenceOutput] = []
    num_joined = 0

    def in_one_message(message: FromEngine) -> Iterable[FromEngine]:
        nonlocal num_joined
        if not isinstance(message, StepOutput):
            return (message,)
        if any(one.prompt_logprobs for one in message.outputs):
            scores.extend(message.outputs)
            return ()
        joined = (*scores, *message.outputs)
        num_joined += bool(scores)
        scores.clear()
        return (StepOutput(outputs=joined),)

    pair.second.served.rewrite = in_one_message
    answer = await pair.complete(prompt_logprobs=1)
    assert (answer["status"], len(pair.second.scripted.adds), num_joined) == (200, 1, 1)
    assert len(answer["choices"][0]["prompt_logprobs"]) == NUM_PROMPT
    assert pair.first.metric("loramux_replica_refusals_total", reason="answers") == 0


def answering(digests: Iterable[str]) -> Lie:
    adapters = tuple(ResidentAdapter(digest=digest, slot=0, num_pages=1, num_users=0) for digest in digests)

    def lie(message: FromEngine) -> Iterable[FromEngine]:
        return (msgspec.structs.replace(message, adapters=adapters) if isinstance(message, Stats) else message,)

    return lie


def other_kind(message: FromEngine) -> Iterable[FromEngine]:
    if isinstance(message, Stats):
        return (AdapterState(call_id=message.call_id, digest="ab" * 32, state="resident"),)
    return (message,)


@pytest.mark.parametrize("lie", [answering(["not a digest"]), other_kind], ids=["malformed digest", "another answer"])
async def test_false_statistics_do_not_stop_the_checks_of_claims(
    pair: Pair, lie: Lie, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "BEAT_S", 0.01)
    monkeypatch.setattr(presence, "STATS_WAIT_S", 0.05)
    monkeypatch.setattr(peer_engine, "DISTRUST_S", 0.05)
    pair.second.served.rewrite = lie
    pair.first.presence.start(asyncio.Event())
    await asyncio.sleep(0.2)
    pair.second.served.rewrite = lambda message: (message,)
    claims = summarise(digest_of(str(number)) for number in range(9))
    claimed = Summary(version=10**6, prefixes=claims)
    ReplicaTable(pair.gateway.database).publish(pair.second.presence._own.row, claimed, has_changed=True)
    await until(lambda: pair.first.metric("loramux_replica_refusals_total", reason="claims") == 1)
    assert (await pair.complete())["status"] == 200


async def test_claimed_adapters_are_loaded_or_run_elsewhere(pair: Pair) -> None:
    """A server that claims every adapter gets requests for adapters that it has yet to load, or cannot load."""
    digests = [digest_of(f"acme/a{number}@1") for number in range(6)]
    for number in range(6):
        pair.gateway.add_adapter("acme", f"a{number}")
    claimed = Summary(version=10**6, prefixes=summarise(digests))
    row = pair.second.presence._own.row
    ReplicaTable(pair.gateway.database).publish(row, claimed, has_changed=True)
    await beat(pair.first)
    assert all(map(pair.first.engine.holds_elsewhere, digests))
    for number in range(6):
        answer = await pair.complete(model=f"acme/a{number}")
        assert (answer["status"], answer["usage"]["completion_tokens"]) == (200, 8)
    assert len(pair.bills()) == 6


def certificate_for(subject: x509.Name) -> str:
    """A certificate of another key with this subject."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM).decode()


async def test_rows_in_the_name_of_other_servers_do_not_separate_honest_servers(
    accounts: Database, threads: ThreadPoolExecutor, short_path: Path
) -> None:
    """Rows of liars copy an honest server's certificate and address, take its subject, or break the parser."""
    table = ReplicaTable(accounts)
    lies = 0

    def publish_lies() -> None:
        """Publish the lies before the honest servers have read each other's rows."""
        nonlocal lies
        for values in table.read({}).rows:
            if not str(values["id"]).startswith("rep_liar"):
                honest = msgspec.convert(values, ReplicaRow)
                subject = x509.load_pem_x509_certificate(honest.certificates.encode()).subject
                broken = x509.load_pem_x509_certificate(honest.certificates.encode()).public_bytes(
                    serialization.Encoding.DER
                )
                for certificates in (
                    honest.certificates,
                    certificate_for(subject),
                    honest.certificates + certificate_for(subject),
                    ssl.DER_cert_to_PEM_cert(broken.replace(b"rep", b"re\xff", 1)),
                ):
                    lies += 1
                    liar = msgspec.structs.replace(honest, id=f"rep_liar{lies}", certificates=certificates)
                    table.publish(liar, Summary(version=1, prefixes=b""), has_changed=True)

    async with (
        open_replica("rep_a", accounts, threads, short_path) as first,
        open_replica("rep_b", accounts, threads, short_path) as second,
    ):
        await beat(first, second)
        publish_lies()
        assert lies == 8
        async with asyncio.timeout(PATIENCE_S):
            while any(one.metric("loramux_peers", state="connected") != 1 for one in (first, second)):
                await beat(first, second)
                await asyncio.sleep(0.05)
        assert [view.id for view in first.router.views] == ["rep_a", "rep_b"]
        assert [view.id for view in second.router.views] == ["rep_b", "rep_a"]
        assert first.metric("loramux_peers", state="refused") == 8
        first.router.wanted = ["rep_b"]
        assert (await collect(first.engine.submit(add("forwarded"))))[1].reason == "length"
        assert len(second.scripted.adds) == 1
