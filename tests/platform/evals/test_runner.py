from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from loramux.adapter_store.errors import InvalidEval
from loramux.adapter_store.registry.eval_claims import EvalClaims
from loramux.adapter_store.registry.evals import PPM, Eval, EvalAnswer
from loramux.engine.protocol.messages import Add
from loramux.migrations.database import Database
from loramux.platform.accounts.tenants import TenantChanges
from loramux.platform.bodies.sampling_fields import MAX_PRIORITY
from loramux.platform.evals import runner as runner_module
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.evals.eval_lab import PATIENCE, EvalLab
from tests.platform.gateways import open_gateway
from tests.platform.ready_adapters import digest_of
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "Say yes"}]


@pytest.fixture
async def lab(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> AsyncIterator[EvalLab]:
    async with open_gateway(accounts, tokenizer, threads, max_model_len=1024) as gateway:
        yield EvalLab(gateway, gateway.add_adapter("acme", "support", versions=2))


def key_of(lab: EvalLab) -> str:
    return lab.gateway.services.callers.api_keys.create(lab.gateway.tenant.id, "evals").key.id


def ended(found: Eval) -> tuple[Any, ...]:
    return found.state, found.score_ppm, found.num_passed, found.error_code


async def test_version_is_graded_and_compared(lab: EvalLab) -> None:
    lab.answer_with({1: "yes", 2: "no"})
    cases = [{"prompt": "Say yes", "equal": "yes"}, {"messages": CHAT, "contains": ["yes", "es"]}]
    async with lab.running():
        found = await lab.finished(lab.create([*cases, {"prompt": "Say no", "equal": "no"}], compared=2))
    assert ended(found) == ("done", 666_666, 2, None)
    assert (found.compared_ppm, found.compared_passed, found.num_answers) == (333_333, 1, 6)
    assert [(one.line, one.side, one.is_passed, one.answer) for one in lab.answers(found)] == [
        (1, 0, True, "yes"),
        (1, 1, False, "no"),
        (2, 0, True, "yes"),
        (2, 1, False, "no"),
        (3, 0, False, "yes"),
        (3, 1, True, "no"),
    ]
    adds = lab.gateway.engine.adds
    assert {add.priority for add in adds} == {MAX_PRIORITY}
    assert {add.sampling.temperature for add in adds} == {0.0}


async def test_operator_is_not_charged_and_a_tenant_is(lab: EvalLab) -> None:
    lab.answer_with({1: "yes"})
    async with lab.running():
        await lab.finished(lab.create([{"prompt": "Say yes", "equal": "yes"}]))
        assert lab.gateway.usage() == []
        key_id = key_of(lab)
        await lab.finished(lab.create([{"prompt": "Say yes", "equal": "yes"}], key_id))
    [event] = lab.gateway.usage()
    assert (event.endpoint, event.model, event.api_key_id) == ("evals", "acme/support@1", key_id)
    engine = lab.gateway.engine
    # The end token is charged, too.
    num_tokens = len(lab.gateway.services.prompts.tokenizer.encode("yes", add_special_tokens=False)) + 1
    assert (event.prompt_tokens, event.completion_tokens) == (len(engine.adds[-1].prompt), num_tokens)


async def test_eval_is_never_a_priority_request(lab: EvalLab) -> None:
    """Not even for a tenant whose requests are `priority` by default, and neither in the engine nor in its bill."""
    changes = TenantChanges(max_service_tier="priority", default_service_tier="priority")
    lab.gateway.services.callers.tenants.update(lab.gateway.tenant.id, changes, lambda _: None)
    lab.answer_with({1: "yes"})
    async with lab.running():
        await lab.finished(lab.create([{"prompt": "Say yes", "equal": "yes"}]))
        await lab.finished(lab.create([{"prompt": "Say yes", "equal": "yes"}], key_of(lab)))
    assert [add.service_tier for add in lab.gateway.engine.adds] == ["default", "default"]
    assert [event.service_tier for event in lab.gateway.usage()] == ["default"]


async def test_judge_decides(lab: EvalLab) -> None:
    lab.answer_with({1: "A poem", 0: "yes"})
    cases = [{"messages": CHAT, "judge": "Is it a poem?"}]
    async with lab.running():
        found = await lab.finished(lab.create(cases, judge="base"))
        lab.answer_with({1: "A poem", 0: "no"})
        refused = await lab.finished(lab.create(cases, judge="base"))
    assert ended(found) == ("done", 1_000_000, 1, None)
    assert ended(refused) == ("done", 0, 0, None)
    assert lab.gateway.engine.adds[-1].grammar


async def test_reference_is_scored_without_generating(lab: EvalLab) -> None:
    lab.answer_with({1: "x"}, logprob=-0.25)
    cases = [{"prompt": "Say", "reference": " yes"}, {"messages": CHAT, "reference": "yes", "min_likelihood": 0.9}]
    async with lab.running():
        found = await lab.finished(lab.create(cases))
    assert ended(found) == ("done", 778_801, 1, None)
    assert [one.answer for one in lab.answers(found)] == ["", ""]


@pytest.mark.parametrize("judge", ["other/secret", "other/absent", "acme/support@9", "nonsense::"])
async def test_foreign_judge_ends_the_eval_like_an_absent_one(lab: EvalLab, judge: str) -> None:
    lab.gateway.add_adapter("other", "secret")
    lab.answer_with({1: "yes"})
    async with lab.running():
        found = await lab.finished(lab.create([{"prompt": "p", "judge": "?"}], judge=judge))
    assert (found.state, found.error_code) == ("failed", "model_not_found")
    assert found.error == f"The model {judge!r} does not exist or you do not have access to it."


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Script]:
    """Makes a script that never answers, and ends the eval's wait for that answer. Other answers may be slow."""
    waits: list[asyncio.Timeout] = []

    def noted(delay_s: float) -> asyncio.Timeout:
        waits.append(asyncio.timeout(delay_s))
        return waits[-1]

    def script() -> Script:
        waits[-1].reschedule(asyncio.get_running_loop().time())
        return Script(token_ids=(), stall_after=0)

    monkeypatch.setattr(runner_module, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": noted}))
    return script


async def test_judge_that_never_answers_ends_the_eval(lab: EvalLab, stalled: Callable[[], Script]) -> None:
    tokens = lab.gateway.services.prompts.tokenizer.encode("yes", add_special_tokens=False)
    lab.gateway.engine.script = lambda add: Script(token_ids=tokens) if add.digest else stalled()
    async with lab.running():
        found = await lab.finished(lab.create([{"prompt": "p", "judge": "?"}] * 20, key_of(lab), judge="base"))
    assert (found.state, found.error_code, found.num_answers) == ("failed", "no_answers", 5)
    assert {one.detail for one in lab.answers(found)} == {"no answer within 60 s"}
    # The abandoned requests are settled.
    assert await lab.gateway.services.run.requests.drain(60)
    settled = {event.request_id: event for event in lab.gateway.usage()}
    assert len(settled) == len(lab.gateway.usage())
    submitted = {add.sequence_id.rpartition("-")[0] for add in lab.gateway.engine.adds}
    assert submitted == settled.keys()
    assert len(submitted) == 10


async def test_line_that_does_not_fit_fails_alone(lab: EvalLab) -> None:
    lab.answer_with({1: "yes"})
    cases = [{"prompt": "word " * 2000, "equal": "yes"}, {"prompt": "p", "equal": "yes"}]
    async with lab.running():
        found = await lab.finished(lab.create(cases))
    assert ended(found) == ("done", 500_000, 1, None)
    assert lab.answers(found)[0].detail.startswith("context_length_exceeded: ")


async def test_spent_quota_ends_the_eval(lab: EvalLab) -> None:
    lab.answer_with({1: "yes"})
    lab.gateway.limit("requests_per_minute", 2)
    async with lab.running():
        found = await lab.finished(lab.create([{"prompt": "p", "equal": "yes"}] * 4, key_of(lab)))
    assert (found.state, found.error_code, found.num_answers) == ("failed", "rate_limit_exceeded", 2)


async def test_revoked_key_ends_the_eval(lab: EvalLab) -> None:
    lab.answer_with({1: "yes"})
    key_id = key_of(lab)
    found = lab.create([{"prompt": "p", "equal": "yes"}], key_id)
    lab.gateway.services.callers.api_keys.revoke(key_id)
    async with lab.running():
        found = await lab.finished(found)
    assert (found.state, found.error_code) == ("failed", "insufficient_scope")
    assert lab.gateway.engine.adds == []


async def test_cancelled_eval_stops(lab: EvalLab) -> None:
    lab.answer_with({1: "yes"}, delay_s=0.05)
    async with lab.running():
        found = lab.create([{"prompt": "p", "equal": "yes"}] * 200)
        await lab.until(found, lambda now: now.num_answers > 0)
        lab.evals.cancel(found.id)
        async with asyncio.timeout(60):
            # The task that asks the questions has the eval's name.
            while any(task.get_name() == found.id for task in asyncio.all_tasks()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert len(lab.gateway.engine.adds) < 200
    assert lab.evals.get(found.id).state == "cancelled"


async def test_dead_servers_eval_is_continued(lab: EvalLab) -> None:
    lab.answer_with({1: "yes"})
    found = lab.create([{"prompt": f"p{line}", "equal": "yes"} for line in range(3)])
    dead = EvalClaims(lab.database, lease_us=0)
    assert dead.claim() is not None
    dead.record(found.id, EvalAnswer(1, 0, 0, False, "stored before the death", ""))
    async with lab.running():
        found = await lab.finished(found)
    assert ended(found) == ("done", 666_666, 2, None)
    assert [one.answer for one in lab.answers(found)] == ["stored before the death", "yes", "yes"]
    assert len(lab.gateway.engine.adds) == 2


async def test_stopped_server_gives_its_eval_back(lab: EvalLab) -> None:
    lab.answer_with({1: "yes"}, delay_s=0.05)
    async with lab.running():
        found = lab.create([{"prompt": "p", "equal": "yes"}] * 30)
        await lab.until(found, lambda now: now.num_answers > 0)
    assert lab.evals.get(found.id).state == "queued"
    lab.answer_with({1: "yes"})
    async with lab.running():
        found = await lab.finished(found)
    assert ended(found) == ("done", 1_000_000, 30, None)


async def test_eval_waits_while_requests_wait(lab: EvalLab) -> None:
    lab.answer_with({1: "yes"})
    lab.gateway.engine.num_waiting = 1
    began_s = time.monotonic()
    async with lab.running():
        await lab.finished(lab.create([{"prompt": "p", "equal": "yes"}]))
    # It waits for a limited time only.
    assert lab.patience.queue_s <= time.monotonic() - began_s


async def test_eval_does_not_wait_for_lines_of_batches(lab: EvalLab) -> None:
    lab.patience = replace(PATIENCE, queue_s=3600)
    lab.answer_with({1: "yes"})
    lab.gateway.engine.num_waiting = lab.gateway.engine.num_background_waiting = 5
    async with lab.running():
        found = await lab.finished(lab.create([{"prompt": "p", "equal": "yes"}]))
    assert ended(found)[0] == "done"


async def test_eval_rests_while_other_requests_run(lab: EvalLab, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, resume, engine = 0.0, asyncio.Event(), lab.gateway.engine
    monkeypatch.setattr(runner_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    lab.patience = replace(PATIENCE, queue_s=60)
    lab.answer_with({1: "yes"})
    answer = engine.script

    def script(add: Add) -> Script:
        nonlocal now_s
        if add.digest is None:
            return Script(token_ids=(5, 6), stall_after=1, resume=resume)
        # A question takes a second.
        now_s += 1
        return answer(add)

    engine.script = script
    body = {"model": "base", "prompt": "p", "max_tokens": 2}
    other = asyncio.create_task(lab.gateway.http.post("/v1/completions", json=body))
    async with asyncio.timeout(60):
        while not engine.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    async with lab.running():
        found = lab.create([{"prompt": "p", "equal": "yes"}] * 24)
        for number in (1, 2):
            await lab.until(found, lambda now, number=number: now.num_answers == number)  # type: ignore[misc]
            now_s += runner_module.REST - 0.1
            # Meanwhile, the eval looks several times whether its rest is over.
            await asyncio.sleep(0.1)
            assert lab.evals.get(found.id).num_answers == number
            now_s += 0.2
        resume.set()
        await other
        # Nothing else runs, so that the eval does not wait for the time to pass.
        found = await lab.finished(found)
    assert (found.state, found.num_answers) == ("done", 24)


async def test_engine_restart_delays_an_eval(lab: EvalLab) -> None:
    engine = lab.gateway.engine
    lab.patience = replace(PATIENCE, refusal_s=60, retry_s=0.02)
    lab.answer_with({1: "yes"})
    answer = engine.script

    def die_once(add: Add) -> Script:
        asyncio.get_running_loop().call_soon(engine.die)
        asyncio.get_running_loop().call_later(0.1, engine.revive)
        engine.script = answer
        return Script(token_ids=(5,) * 9, delay_s=0.1)

    engine.script = die_once
    async with lab.running():
        found = await lab.finished(lab.create([{"prompt": "p", "equal": "yes"}] * 2))
    assert ended(found) == ("done", 1_000_000, 2, None)
    assert {add.digest for add in engine.adds} == {digest_of("acme/support@1")}


NUM_OWN = 4
LONG_PROMPT = "Say yes if the harbour is open"


async def test_eval_leaves_a_server_whose_engine_is_gone(lab: EvalLab) -> None:
    engine = lab.gateway.engine
    lab.patience = replace(PATIENCE, refusal_s=60, retry_s=0.02, engine_s=0.1)
    lab.answer_with({1: "yes"})
    answer = engine.script

    def die(add: Add) -> Script:
        asyncio.get_running_loop().call_soon(engine.die)
        return Script(token_ids=(5,) * 9, stall_after=0)

    engine.script = die
    found = lab.create([{"prompt": "p", "equal": "yes"}])
    async with lab.running():
        await lab.until(found, lambda now: bool(engine.adds) and now.state == "queued")
        engine.script = answer
        engine.revive()
        assert ended(await lab.finished(found)) == ("done", PPM, 1, None)


async def test_divergence_of_a_shared_cache_is_measured(lab: EvalLab) -> None:
    """The adapter applies from the same position in the answer's scores as in the answer."""
    tokenizer = lab.gateway.services.prompts.tokenizer
    lab.gateway.engine.script = lambda add: Script(
        token_ids=tokenizer.encode("no" if add.activation else "yes", add_special_tokens=False),
        logprob=-2.0 if add.activation else -1.0,
    )
    cases = [
        {"prompt": LONG_PROMPT, "equal": "yes"},
        {"prompt": LONG_PROMPT, "reference": " yes", "min_likelihood": 0.2},
        # The adapter computes the whole of this prompt.
        {"prompt": "Say", "equal": "yes"},
    ]
    async with lab.running():
        found = await lab.finished(lab.create(cases, share_base_cache=NUM_OWN))
    assert (found.state, found.compared, found.share_base_cache) == ("done", 1, NUM_OWN)
    assert (found.num_passed, found.compared_passed) == (3, 1)
    # The scripted engine's log-probabilities are -1, -2 to -5, and twice as much.
    exact, other = [-1.0 * rank for rank in range(1, 6)], [-2.0 * rank for rank in range(1, 6)]
    rests = [math.log(1 - sum(map(math.exp, named))) for named in (exact, other)]
    pairs = [*zip(exact, other, strict=True), (rests[0], rests[1])]
    nats = sum(math.exp(p) * (p - q) for p, q in pairs)
    measured = {(one.line, one.side): one.divergence_ppm for one in lab.answers(found)}
    expected = round(nats * PPM)
    assert measured == {(1, 0): None, (1, 1): expected, (2, 0): None, (2, 1): expected, (3, 0): None, (3, 1): None}
    assert lab.answers(found)[-1].detail == "divergence not measured: the adapter computes the whole prompt of 3 tokens"
    assert found.divergence_ppm == expected
    adds = lab.gateway.engine.adds
    num_prompt = len(tokenizer.encode(LONG_PROMPT))
    assert {add.activation for add in adds if add.prompt[:num_prompt] == adds[0].prompt} == {0, num_prompt - NUM_OWN}


async def test_a_failed_measurement_keeps_the_grade(lab: EvalLab, stalled: Callable[[], Script]) -> None:
    token_ids = lab.gateway.services.prompts.tokenizer.encode("yes", add_special_tokens=False)
    lab.gateway.engine.script = lambda add: (
        Script(token_ids=token_ids) if add.sampling.num_prompt_logprobs is None else stalled()
    )
    async with lab.running():
        found = await lab.finished(lab.create([{"prompt": LONG_PROMPT, "equal": "yes"}], share_base_cache=NUM_OWN))
    assert (*ended(found), found.compared_ppm) == ("done", PPM, 1, None, PPM)
    assert found.divergence_ppm is None
    detail = "divergence not measured: no answer within 60 s"
    assert [(one.is_passed, one.detail) for one in lab.answers(found)] == [(True, ""), (True, detail)]


async def test_divergence_is_measured_in_a_full_context(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor
) -> None:
    num_prompt = len(tokenizer.encode(LONG_PROMPT))
    token_ids = tokenizer.encode(" yes yes yes", add_special_tokens=False)
    async with open_gateway(accounts, tokenizer, threads, max_model_len=num_prompt + len(token_ids)) as gateway:
        lab = EvalLab(gateway, gateway.add_adapter("acme", "support"))
        gateway.engine.script = lambda add: Script(token_ids=token_ids, logprob=-1.0)
        cases = [{"prompt": LONG_PROMPT, "contains": "yes", "max_tokens": len(token_ids)}]
        async with lab.running():
            found = await lab.finished(lab.create(cases, share_base_cache=NUM_OWN))
        assert (*ended(found), found.divergence_ppm) == ("done", PPM, 1, None, 0)
        assert {len(add.prompt) for add in gateway.engine.adds} == {num_prompt, num_prompt + len(token_ids) - 1}


async def test_a_reference_is_scored_once_for_each_form(lab: EvalLab) -> None:
    lab.answer_with({1: "x"})
    cases = [{"prompt": LONG_PROMPT, "reference": " yes"}]
    adds = lab.gateway.engine.adds
    async with lab.running():
        found = await lab.finished(lab.create(cases, share_base_cache=NUM_OWN))
        assert found.divergence_ppm is not None
        assert [(bool(add.activation), add.sampling.num_prompt_logprobs) for add in adds] == [(False, 5), (True, 5)]
        adds.clear()
        await lab.finished(lab.create(cases))
    # Without the option, no other tokens are ranked.
    assert [add.sampling.num_prompt_logprobs for add in adds] == [0]


async def test_an_answer_without_text_is_not_measured(lab: EvalLab) -> None:
    lab.gateway.engine.script = lambda add: Script(token_ids=())
    async with lab.running():
        found = await lab.finished(lab.create([{"prompt": LONG_PROMPT, "equal": ""}], share_base_cache=NUM_OWN))
    assert (*ended(found), found.divergence_ppm) == ("done", PPM, 1, None, None)
    assert lab.answers(found)[-1].detail == "divergence not measured: there is no text to score"


async def test_only_one_kind_of_comparison_is_possible(lab: EvalLab) -> None:
    cases = [{"prompt": "Say yes", "equal": "yes"}]
    with pytest.raises(InvalidEval) as refused:
        lab.create(cases, compared=2, share_base_cache=NUM_OWN)
    assert refused.value.code == "invalid_comparison"
    checker = lab.gateway.add_adapter("acme", "checker", invocation_tokens=(5,))
    with pytest.raises(InvalidEval, match="activated adapter"):
        replace(lab, adapter_id=checker).create(cases, share_base_cache=NUM_OWN)
