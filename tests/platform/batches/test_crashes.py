"""Batches whose server died, stalled or stopped: every line is answered once, and charged as its answer says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from loramux.adapter_store.errors import ClaimLost
from loramux.migrations import schema
from loramux.migrations.claims import end_claims
from loramux.migrations.database import Database
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.database_health import DatabaseTrouble
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.admission.reservation_rows import LEASE_US
from loramux.platform.batches import answer_writer, batch_run
from loramux.platform.batches.answer_writer import AnswerWriter
from loramux.platform.batches.batch_claims import BatchClaim, BatchQueue, StoredAnswer, WaitingLine
from loramux.platform.batches.input_lines import InputLine, read_lines
from loramux.platform.batches.output_lines import answered
from loramux.platform.batches.tenant_files import UPLOAD_US, TenantFile
from loramux.platform.errors import NotFound
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.batches.batch_lab import CHAT, BatchLab, content_of, line
from tests.platform.clocked_databases import FakeClock
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.scripted_engine import Script
from tests.platform.storing import KEY, allow

pytestmark = pytest.mark.anyio

USAGE = Settlement(status="completed", prompt_tokens=70, completion_tokens=30, cached_tokens=5)


@dataclass
class Dead:
    """A server that claimed a batch of two lines and then died."""

    lab: BatchLab
    claim: BatchClaim
    batch_id: str
    lines: list[WaitingLine]
    key_id: str

    def reserve(self, line: WaitingLine) -> None:
        gateway = self.lab.gateway
        Admission(gateway.database).reserve(
            ReservationRequest(
                request_id=line.request_id,
                tenant_id=gateway.tenant.id,
                api_key_id=self.key_id,
                model="base",
                adapter_version_id=None,
                endpoint="batches",
                prompt_tokens=70,
                reserved_tokens=120,
            )
        )

    def store(self, line: WaitingLine, custom_id: str) -> None:
        body = {"usage": {"prompt_tokens": 70, "completion_tokens": 30}}
        content = answered(line.line, self.batch_id, custom_id, line.request_id, 200, body)
        self.claim.record(self.batch_id, [(line, StoredAnswer(200, content, USAGE))])


async def dead_server(lab: BatchLab, tmp_path: Path, **options: Any) -> Dead:
    lines = [line("a"), line("b")]
    batch = await lab.create(lines, **options)
    claimed = BatchQueue(lab.gateway.database).claim()
    assert claimed is not None
    path = tmp_path / "input"
    path.write_bytes(content_of(lines))
    found = [one for one in read_lines(path, CHAT, 10_000) if isinstance(one, InputLine)]
    assert claimed.claim.begin(batch.id, found, lambda: True) == "in_progress"
    named = list(claimed.claim.waiting(batch.id, 10))
    return Dead(lab, claimed.claim, batch.id, named, claimed.batch.api_key_id)


async def continued(dead: Dead, clock: FakeClock, after_s: int = 31) -> list[dict[str, Any]]:
    clock.advance(after_s)
    batch = await dead.lab.gateway.openai.batches.retrieve(dead.batch_id)
    async with dead.lab.running():
        batch = await dead.lab.finished(batch)
    answers, errors = await dead.lab.outputs(batch)
    assert ([one["custom_id"] for one in answers], errors) == (["a", "b"], [])
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 2
    return answers


def check_ledger(lab: BatchLab, answers: list[dict[str, Any]]) -> None:
    """Every answer is charged once, and nothing else is."""
    usages = [one["response"]["body"]["usage"] for one in answers]
    assert lab.tokens() == sum(usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    with lab.gateway.database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM reservations").scalar_one() == 0


async def test_stored_answer_is_settled_and_not_asked_again(
    gateway_on_each: Gateway, clock: FakeClock, tmp_path: Path
) -> None:
    lab = BatchLab(gateway_on_each)
    dead = await dead_server(lab, tmp_path)
    dead.reserve(dead.lines[0])
    dead.store(dead.lines[0], "a")
    answers = await continued(dead, clock)
    assert len(gateway_on_each.engine.adds) == 1
    check_ledger(lab, answers)


async def test_request_without_an_answer_is_not_charged(
    gateway_on_each: Gateway, clock: FakeClock, tmp_path: Path
) -> None:
    lab = BatchLab(gateway_on_each)
    dead = await dead_server(lab, tmp_path)
    for one in dead.lines:
        dead.reserve(one)
    answers = await continued(dead, clock)
    assert len(gateway_on_each.engine.adds) == 2
    assert {one["response"]["request_id"] for one in answers}.isdisjoint({one.request_id for one in dead.lines})
    check_ledger(lab, answers)


async def test_restarted_only_server_continues_at_once(
    gateway_on_each: Gateway, clock: FakeClock, tmp_path: Path
) -> None:
    lab = BatchLab(gateway_on_each)
    dead = await dead_server(lab, tmp_path)
    dead.reserve(dead.lines[0])
    assert BatchQueue(gateway_on_each.database).claim() is None
    end_claims(gateway_on_each.database, (schema.batches, schema.evals))
    check_ledger(lab, await continued(dead, clock, after_s=0))
    with pytest.raises(ClaimLost):
        dead.store(dead.lines[1], "b")


async def test_recovered_requests_are_corrected(gateway_on_each: Gateway, clock: FakeClock, tmp_path: Path) -> None:
    lab = BatchLab(gateway_on_each)
    dead = await dead_server(lab, tmp_path)
    for one in dead.lines:
        dead.reserve(one)
    dead.store(dead.lines[0], "a")
    clock.advance(LEASE_US / 1_000_000 + 1)
    assert Admission(gateway_on_each.database).recover_expired() == 2
    answers = await continued(dead, clock)
    check_ledger(lab, answers)


async def test_stalled_server_can_no_longer_store(gateway_on_each: Gateway, clock: FakeClock, tmp_path: Path) -> None:
    lab = BatchLab(gateway_on_each)
    dead = await dead_server(lab, tmp_path)
    clock.advance(31)
    taken = BatchQueue(gateway_on_each.database).claim()
    assert taken is not None
    calls: list[Callable[[], Any]] = [
        lambda: dead.store(dead.lines[0], "a"),
        lambda: dead.claim.renew(dead.batch_id),
        lambda: dead.claim.rename(dead.batch_id, dead.lines[0]),
        lambda: dead.claim.begin_files(dead.batch_id),
    ]
    for call in calls:
        with pytest.raises(ClaimLost):
            call()
    # The same server cannot store an answer under an older request, either.
    taken.claim.waiting(dead.batch_id, 10)
    with pytest.raises(ClaimLost):
        replace(dead, claim=taken.claim).store(dead.lines[0], "a")


async def test_interrupted_files_are_written_again(gateway_on_each: Gateway, clock: FakeClock, tmp_path: Path) -> None:
    lab = BatchLab(gateway_on_each)
    dead = await dead_server(lab, tmp_path, output_expires_after={"anchor": "created_at", "seconds": 3600})
    for one, custom_id in zip(dead.lines, "ab", strict=True):
        dead.store(one, custom_id)
    begun = dead.claim.begin_files(dead.batch_id)
    gateway_on_each.kept.files._blobs.put(f"files/{begun.tenant_id}/{begun.output_file_id}", b"half of it")
    await continued(dead, clock, after_s=2 * 3600)
    assert gateway_on_each.engine.adds == []
    file = await gateway_on_each.openai.files.retrieve(begun.output_file_id or "")
    assert file.expires_at == file.created_at + 3 * 3600, "the file must not expire before it is written"


async def test_files_of_an_unfinished_batch_are_not_swept(
    gateway_on_each: Gateway, clock: FakeClock, tmp_path: Path
) -> None:
    """The batch first ended its lines long ago, so that its new files look as old."""
    lab, files = BatchLab(gateway_on_each), gateway_on_each.kept.files
    dead = await dead_server(lab, tmp_path)
    for one, custom_id in zip(dead.lines, "ab", strict=True):
        dead.store(one, custom_id)
    dead.claim.begin_files(dead.batch_id)
    clock.advance(UPLOAD_US / 1e6 + 1)
    finish = BatchClaim.finish

    def finish_late(*args: Any) -> None:
        files.clear_up()
        finish(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchClaim, "finish", finish_late)
        await continued(dead, clock)


async def test_file_that_an_earlier_version_could_not_delete_is_written_again(
    gateway_on_each: Gateway, clock: FakeClock, tmp_path: Path
) -> None:
    lab, files = BatchLab(gateway_on_each), gateway_on_each.kept.files
    dead = await dead_server(lab, tmp_path)
    for one, custom_id in zip(dead.lines, "ab", strict=True):
        dead.store(one, custom_id)
    batch = dead.claim.begin_files(dead.batch_id)
    path = tmp_path / "output"
    path.write_bytes(b"half of it")
    file_id = batch.output_file_id or ""
    put = TenantFile(
        id=file_id,
        tenant_id=batch.tenant_id,
        api_key_id=batch.api_key_id,
        purpose="batch_output",
        name="out",
        num_bytes=10,
        created_us=clock(),
        expires_us=None,
    )
    files.put_output(put, path)
    with gateway_on_each.database.write() as connection:
        connection.execute(update(schema.files).where(schema.files.c.id == file_id).values(state="deleting"))
    await continued(dead, clock)


async def test_batch_without_its_output_file_does_not_end(
    gateway_on_each: Gateway, clock: FakeClock, tmp_path: Path
) -> None:
    lab = BatchLab(gateway_on_each)
    dead = await dead_server(lab, tmp_path)
    for one, custom_id in zip(dead.lines, "ab", strict=True):
        dead.store(one, custom_id)
    batch = dead.claim.begin_files(dead.batch_id)
    with pytest.raises(NotFound):
        dead.claim.finish(batch.id, "completed", [batch.output_file_id, None], 0)
    await continued(dead, clock)


@pytest.mark.parametrize(
    ("url", "error"),
    [(CHAT, ClaimLost("lost")), ("/v1/responses", DatabaseTrouble("down"))],
    ids=["lost claim", "failing database"],
)
async def test_line_that_runs_again_stores_one_object(
    clocked: Database,
    clock: FakeClock,
    tokenizer: ModelTokenizer,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    error: Exception,
) -> None:
    """The first attempt has stored its answer for the tenant, but not for the batch."""
    record, has_failed = BatchClaim.record, threading.Event()

    def fail_once(*args: Any) -> Any:
        if has_failed.is_set():
            return record(*args)
        has_failed.set()
        raise error

    monkeypatch.setattr(BatchClaim, "record", fail_once)
    async with open_gateway(clocked, tokenizer, threads, GatewaySettings(response_key=KEY)) as gateway:
        allow(clocked, gateway.tenant.id)
        lab = BatchLab(gateway)
        asked = {"messages": [{"role": "user", "content": "a"}]} if url == CHAT else {"input": "a"}
        body = {"model": "base", "store": True, **asked}
        batch = await lab.create([{**line("a", url=url), "body": body}], endpoint=url)
        async with lab.running():
            await asyncio.to_thread(has_failed.wait, 20)
        clock.advance(31)
        async with lab.running():
            [answer], errors = await lab.outputs(await lab.finished(batch))
    assert errors == []
    table = schema.chat_completions if url == CHAT else schema.responses
    with clocked.read() as connection:
        assert connection.scalars(select(table.c.id)).all() == [answer["response"]["body"]["id"]]


async def test_stopped_server_gives_its_batch_back(gateway: Gateway) -> None:
    lab = BatchLab(gateway)
    resume = lab.hold_after(4)
    batch = await lab.create([line(f"{number}") for number in range(60)])
    async with lab.running():
        await lab.until(batch, lambda now: now.request_counts.completed == 4)
        resume.set()
    assert await gateway.services.run.requests.drain(60)
    assert (await gateway.openai.batches.retrieve(batch.id)).status == "in_progress"
    async with lab.running():
        answers, errors = await lab.outputs(await lab.finished(batch))
    assert (len(answers), errors) == (60, [])
    check_ledger(lab, answers)


async def test_stopped_server_stores_finished_answers(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, num_given, all_given = BatchLab(gateway), 0, asyncio.Event()
    store = AnswerWriter.store

    async def noted(self: AnswerWriter, waiting: WaitingLine, answer: StoredAnswer) -> None:
        nonlocal num_given
        num_given += 1
        if num_given == 3:
            all_given.set()
        await store(self, waiting, answer)

    monkeypatch.setattr(AnswerWriter, "store", noted)
    monkeypatch.setattr(answer_writer, "GATHER_S", 0.5)
    monkeypatch.setattr(batch_run, "STORE_S", 60.0)
    batch = await lab.create([line(f"{number}") for number in range(3)])
    async with lab.running(), asyncio.timeout(20):
        await all_given.wait()
    batch = await gateway.openai.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed) == ("in_progress", 3)
    assert len(gateway.usage()) == 3


async def test_files_are_swept_without_batches(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, draining, loop = BatchLab(gateway), asyncio.Event(), asyncio.get_running_loop()
    batch = await lab.create([line("a")])
    monkeypatch.setattr(gateway.kept.files, "clear_up", lambda: loop.call_soon_threadsafe(draining.set))
    async with asyncio.timeout(20):
        await lab.runner().run(draining, claims=False)
    assert (await gateway.openai.batches.retrieve(batch.id)).status == "validating"


async def test_lines_survive_the_engine(gateway: Gateway) -> None:
    lab = BatchLab(gateway)
    gateway.engine.script = lambda add: Script(token_ids=(5, 6), delay_s=0.01)
    batch = await lab.create([line(f"{number}") for number in range(40)])
    async with lab.running():
        await lab.until(batch, lambda now: now.request_counts.completed > 3)
        gateway.engine.die()
        await asyncio.sleep(0.05)
        gateway.engine.revive()
        answers, errors = await lab.outputs(await lab.finished(batch))
    assert (len(answers), errors) == (40, [])
    check_ledger(lab, answers)


async def test_answers_are_stored_together_or_not_at_all(gateway_on_each: Gateway, tmp_path: Path) -> None:
    dead = await dead_server(BatchLab(gateway_on_each), tmp_path)
    answers = [StoredAnswer(200, b"first\n", USAGE), StoredAnswer(400, b"second\n", None)]
    first, second = dead.lines
    stale = replace(second, request_id="req_of_an_earlier_claim")
    with pytest.raises(ClaimLost):
        dead.claim.record(dead.batch_id, [(first, answers[0]), (stale, answers[1])])
    assert [one.content for one in dead.claim.answers(dead.batch_id)] == [None, None]
    dead.claim.record(dead.batch_id, list(zip(dead.lines, answers, strict=True)))
    assert [(one.status, one.content) for one in dead.claim.answers(dead.batch_id)] == [
        (200, b"first\n"),
        (400, b"second\n"),
    ]
    batch = await gateway_on_each.openai.batches.retrieve(dead.batch_id)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
