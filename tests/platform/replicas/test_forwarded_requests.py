"""Requests over HTTP whose sequences run on another server: their answers, bills and quotas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from loramux.adapter_store.registry.bases import Bases
from loramux.engine.protocol.messages import Finished, FromEngine, StatsRequest
from loramux.migrations.database import Database
from loramux.platform.engine_link import followed_engine
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.ready_adapters import add_ready_adapter, digest_of
from tests.platform.replicas.lab import PROMPTS, beat, until
from tests.platform.replicas.pair import Pair, open_pair
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

OLD, NEW = "a" * 64, "b" * 64


@asynccontextmanager
async def open_bases(
    database: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, directory: Path
) -> AsyncIterator[Pair]:
    """A server of the base OLD with a gateway, and one of the base NEW, which gets all requests at first."""
    bases = Bases(database)
    for base_id in (OLD, NEW):
        bases.register(base_id, "base", PROMPTS)
    bases.set_weights({OLD: 0, NEW: 100})
    async with open_pair(database, tokenizer, threads, directory, (OLD, NEW)) as pair:
        yield pair


REQUESTS: list[dict[str, Any]] = [
    {},
    {"stop": "b"},
    {"n": 3, "max_tokens": 5},
    {"prompt": ["abc", "abcdef"], "logprobs": 2},
    {"echo": True, "max_tokens": 4},
    {"max_tokens": 200, "ignore_eos": True},
]


async def test_forwarded_requests_have_the_same_answers_and_bills(
    clocked: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, short_path: Path
) -> None:
    async with open_pair(clocked, tokenizer, threads, short_path) as pair:
        answers, bills = [], []
        for wanted in ("rep_a", "rep_b"):
            pair.first.router.wanted = [wanted]
            before = len(pair.bills())
            answers.append([await pair.complete(**request) for request in REQUESTS])
            bills.append(pair.bills()[before:])
        for here, there in zip(*answers, strict=True):
            assert (there["status"], there["choices"], there["usage"]) == (200, here["choices"], here["usage"])
        assert bills[0] == bills[1]
        assert len(bills[0]) == len(REQUESTS)
        assert len(pair.second.scripted.adds) == len(pair.first.scripted.adds) == 9
        await until(lambda: pair.second.scripted.num_running == 0)
        # All tokens of both engines are billed or counted as discarded by the one gateway.
        engines = [await engine.call(StatsRequest(), 1.0) for engine in (pair.first.scripted, pair.second.scripted)]
        billed = sum(bill[3] for bill in pair.bills() if isinstance(bill[3], int))
        metrics = pair.gateway.services.metrics.registry
        discarded = metrics.get_sample_value("loramux_tokens_total", {"kind": "discarded"})
        assert billed + (discarded or 0) == sum(stats.completion_tokens for stats in engines)


async def test_request_that_had_not_started_survives_the_death_of_its_server(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, short_path: Path
) -> None:
    async with open_pair(accounts, tokenizer, threads, short_path) as pair:
        pair.second.scripted.script = lambda add: Script(token_ids=(1,) * 8, stall_after=0)
        asking = asyncio.create_task(pair.complete())
        await until(lambda: len(pair.second.scripted.adds) == 1)
        await pair.second.listener.close()
        answer = await asking
        assert (answer["status"], answer["usage"]["completion_tokens"]) == (200, 8)
        (moved,) = pair.first.scripted.adds
        assert moved.sequence_id == pair.second.scripted.adds[0].sequence_id
        assert [bill[0] for bill in pair.bills()] == ["completed"]
        assert pair.first.metric("loramux_forwarded_sequences_total", outcome="moved") == 1
        pair.second.scripted.die()


async def test_request_that_had_started_ends_with_an_error_and_pays_what_it_got(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, short_path: Path
) -> None:
    async with open_pair(accounts, tokenizer, threads, short_path) as pair:
        pair.second.scripted.script = lambda add: Script(token_ids=add.prompt[:1] * 8, stall_after=3)
        body = {"model": "base", "prompt": "abc", "max_tokens": 8, "stream": True}
        lines: list[str] = []

        async def read() -> None:
            async with pair.gateway.http.stream("POST", "/v1/completions", json=body) as answer:
                lines.extend([line async for line in answer.aiter_lines() if line])

        reading = asyncio.create_task(read())
        await until(lambda: sum(pair.gateway.services.run.requests.progress().values()) == 3)
        await pair.second.listener.close()
        await reading
        assert "engine_unavailable" in lines[-1]
        assert not pair.first.scripted.adds
        ((status, _, _, completion_tokens, _),) = pair.bills()
        assert (status, completion_tokens) == ("failed", 3)
        assert pair.first.metric("loramux_forwarded_sequences_total", outcome="lost") == 1
        pair.second.scripted.die()


async def test_request_pays_for_its_prompt_if_the_dead_engine_was_between_two_steps(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, short_path: Path
) -> None:
    """The other server does not know which sequences its engine had run, but the received tokens prove it."""
    async with open_pair(accounts, tokenizer, threads, short_path) as pair:
        pair.second.scripted.script = lambda add: Script(token_ids=add.prompt[:1] * 8, stall_after=3)
        asking = asyncio.create_task(pair.complete())
        await until(lambda: sum(pair.gateway.services.run.requests.progress().values()) == 3)
        pair.second.served.die(ran=frozenset())
        assert (await asking)["status"] == 503
        assert pair.bills() == [("failed", "base", 4, 3, 0)]


async def test_adapter_held_by_another_server_is_no_cold_load(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, short_path: Path
) -> None:
    async with open_pair(accounts, tokenizer, threads, short_path) as pair:
        for name in ("held", "cold"):
            pair.gateway.add_adapter("acme", name)
        pair.gateway.limit("cold_loads_per_minute", 0)
        pair.second.scripted.resident[digest_of("acme/held@1")] = 1
        await beat(pair.second, pair.first)
        assert (await pair.complete(model="held"))["status"] == 200
        assert (await pair.complete(model="cold"))["status"] == 429
        assert [add.digest for add in pair.second.scripted.adds] == [digest_of("acme/held@1")]


async def test_weights_move_requests_to_another_base_and_back(
    clocked: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, short_path: Path
) -> None:
    async with open_bases(clocked, tokenizer, threads, short_path) as pair:
        bases, answers, bills = Bases(clocked), [], []
        for weights in ({OLD: 0, NEW: 100}, {OLD: 100, NEW: 0}, {}):
            bases.set_weights(weights)
            await beat(pair.first, pair.second)
            before = len(pair.bills())
            answers.append([await pair.complete(**request) for request in REQUESTS])
            bills.append(pair.bills()[before:])
        assert (len(pair.second.scripted.adds), len(pair.first.scripted.adds)) == (9, 18)
        assert [[answer["status"] for answer in found] for found in answers] == [[200] * len(REQUESTS)] * 3
        assert bills[0] == bills[1] == bills[2]
        assert pair.first.metric("loramux_base_fallbacks_total") == 0
        assert [base.is_shared for base in bases.list()] == [True, True]
        # Without weights, the servers refuse each other again.
        assert pair.first.metric("loramux_peers", state="refused") == 1


async def test_base_that_cannot_serve_a_request_leaves_it_to_the_other(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, short_path: Path
) -> None:
    async with open_bases(accounts, tokenizer, threads, short_path) as pair:
        first, second = pair.first.scripted.adds, pair.second.scripted.adds
        for name, base_id in (("old", OLD), ("new", NEW), ("none", None)):
            digests = [digest_of(name)]
            add_ready_adapter(accounts, pair.gateway.tenant.id, name, digests, base_id=base_id)
        answers = {name: await pair.complete(model=name) for name in ("old", "new", "none")}
        assert {name: answer["status"] for name, answer in answers.items()} == {"old": 200, "new": 200, "none": 409}
        assert answers["none"]["error"]["code"] == "adapter_not_validated"
        assert [add.digest for add in first] == [digest_of("old")]
        assert [add.digest for add in second] == [digest_of("new")]
        assert pair.first.metric("loramux_base_fallbacks_total") == 1
        listed = (await pair.gateway.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["base", "acme/new", "acme/old"]
        # The drawn base loses its last server.
        await pair.second.presence.close()
        await beat(pair.first)
        assert (await pair.complete())["status"] == 200
        assert (await pair.complete(model="new"))["status"] == 503
        assert (len(first), len(second)) == (2, 1)
        assert pair.first.metric("loramux_base_fallbacks_total") == 2
        assert [bill[:2] for bill in pair.bills()][-2:] == [("completed", "base"), ("failed", "acme/new@1")]


async def test_request_that_kills_the_engines_of_other_servers_is_refused(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, short_path: Path
) -> None:
    async with open_pair(accounts, tokenizer, threads, short_path) as pair:
        first, second = pair.first, pair.second
        peer = first.presence._peers[second.id]
        second.scripted.script = lambda add: Script(token_ids=add.prompt[:1] * 8, stall_after=3)
        for _ in range(2):
            # Two choices of a request that die together are one death.
            asking = asyncio.create_task(pair.complete(n=2))
            await until(lambda: second.scripted.num_running == 2)
            second.served.die(ran=frozenset(add.sequence_id for add in second.scripted.adds[-2:]))
            assert (await asking)["status"] == 503
            await until(lambda: not peer.is_ready)
            second.served.revive()
            await until(lambda: peer.is_ready)
            await beat(second, first)
        answer = await pair.complete(n=2)
        assert (answer["status"], answer["error"]["code"]) == (400, "request_excluded")
        assert len(second.scripted.adds) == 4


async def test_deaths_count_if_the_other_server_has_more_engines(
    accounts: Database,
    tokenizer: ModelTokenizer,
    threads: ThreadPoolExecutor,
    short_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection stays when one of several engines dies."""
    monkeypatch.setattr(followed_engine, "GATHER_S", 0.01)

    def died(message: FromEngine) -> tuple[FromEngine, ...]:
        if isinstance(message, Finished):
            return (structs.replace(message, reason="error", code="engine_unavailable"),)
        return (message,)

    async with open_pair(accounts, tokenizer, threads, short_path) as pair:
        strikes = pair.first.presence._strikes
        pair.second.served.rewrite = died
        assert (await pair.complete())["status"] == 503
        await until(lambda: len(strikes) == 1)
        assert not strikes.is_refused(pair.second.scripted.adds[0])
        assert (await pair.complete())["status"] == 503
        await until(lambda: strikes.is_refused(pair.second.scripted.adds[0]))
