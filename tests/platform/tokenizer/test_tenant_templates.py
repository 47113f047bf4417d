from __future__ import annotations

import asyncio
import marshal
import sys
import threading
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import structlog

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.sandbox.confined_pool import Ended
from loramux.adapter_store.sandbox.confinement import CALLS, FILES
from loramux.adapter_store.validation.validator import missing_measures
from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.engine.chat_templates.content_form import ContentForm, ContentForms
from loramux.engine.chat_templates.template_refused import TemplateRefused
from loramux.platform.errors import InvalidRequest, RateLimited, Unavailable
from loramux.platform.tokenizer import tenant_templates as templates_module
from loramux.platform.tokenizer.template_worker import TemplateAnswer
from loramux.platform.tokenizer.tenant_templates import (
    MAX_KEPT_PER_TENANT,
    MAX_TEMPLATE_CHARS,
    NUM_PROCESSES,
    TenantTemplates,
)
from tests.adapter_store.sandbox import lesser_kernel
from tests.conformance.chat_templates import BOS, CASES, EOS
from tests.engine.chat_templates.templates import BY_ROLE, CHATML, EITHER, FIRST_PART, HEADERS, PARTS, TEMPLATES
from tests.platform.tokenizer.hostile_templates import COSTLY, ESCAPES, SLOW, UNUSABLE

pytestmark = pytest.mark.anyio

SPECIAL_TOKENS = {"bos_token": BOS, "eos_token": EOS}
ASKED = [{"role": "user", "content": "Hello 🦊"}]
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = COSTLY["endless loop"]


@pytest.fixture(scope="module")
def templates() -> Iterator[TenantTemplates]:
    with pytest.MonkeyPatch.context() as patch:
        # On a busy machine, the processor time must end a rendering, too.
        for name in ("QUICK", "FULL"):
            patch.setattr(templates_module, name, replace(getattr(templates_module, name), wall_s=600.0, niceness=0))
        made = TenantTemplates(SPECIAL_TOKENS)
    made.preload()
    yield made
    made.close()


async def outcome(rendering: Awaitable[str]) -> str | tuple[str, str | None]:
    """Return the text, or the refusal's message and parameter."""
    try:
        return await rendering
    except (InvalidRequest, TemplateRefused) as refused:
        return refused.message, refused.param


@pytest.mark.parametrize("name", TEMPLATES)
async def test_prompts_equal_those_of_the_same_template_in_process(templates: TenantTemplates, name: str) -> None:
    ours = ChatTemplate({"default": TEMPLATES[name]}, SPECIAL_TOKENS)

    async def in_process(messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        return ours.render(messages, **options)

    for messages, options in CASES.values():
        expected = await outcome(in_process(messages, options))
        assert await outcome(templates.render("a", TEMPLATES[name], messages, **options)) == expected


async def test_two_tenants_have_two_templates(templates: TenantTemplates) -> None:
    prompts = await asyncio.gather(
        *(templates.render(tenant, f"{tenant}: {PLAIN}", ASKED) for tenant in ("a", "b") * 10)
    )
    assert prompts == ["a: Hello 🦊", "b: Hello 🦊"] * 10


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.campaign if name in SLOW else ()) for name in COSTLY]
)
async def test_costly_template_is_refused_within_a_second(
    templates: TenantTemplates, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_s: list[float] = []
    decoded = templates_module._decoded

    def noted(ended: Ended) -> TemplateAnswer:
        used_s.append(ended.cpu_s)
        return decoded(ended)

    monkeypatch.setattr(templates_module, "_decoded", noted)
    with pytest.raises(InvalidRequest) as caught:
        await templates.render("a", COSTLY[name], ASKED)
    # The limit is of processor time, because a busy machine takes longer. The kernel ends a process a moment later.
    assert used_s[-1] < 1.5
    assert caught.value.param in ("messages", "chat_template")
    assert len(caught.value.message) < 700
    assert await templates.render("a", PLAIN, ASKED) == "Hello 🦊"


@pytest.mark.parametrize("name", ESCAPES)
async def test_template_reaches_nothing_outside_its_variables(templates: TenantTemplates, name: str) -> None:
    given = await outcome(templates.render("a", ESCAPES[name], ASKED))
    if isinstance(given, str):
        assert not given.replace("Undefined", "").strip("[], '\n{}a:")
    else:
        assert given[1] in ("messages", "chat_template")
    with pytest.raises(InvalidRequest):
        await templates.check("a", ESCAPES[name])


ESCAPED = """
import os, socket
name, blocks, debug_info = None, {}, ""
def root(context, missing=None, environment=environment):
    for attempt in (os.fork, socket.socket, lambda: os.kill(os.getppid(), 0), lambda: open("/etc/passwd")):
        try:
            attempt()
            yield "done "
        except OSError:
            yield "refused "
"""


async def test_template_that_escapes_is_still_confined(templates: TenantTemplates) -> None:
    lacking = missing_measures()
    if CALLS in lacking or FILES in lacking:
        pytest.skip(f"this machine has no {' and no '.join(lacking)}")
    await templates.render("a", PLAIN, ASKED)
    templates._known["a", PLAIN, ()].code = marshal.dumps(compile(ESCAPED, "escaped", "exec"))
    try:
        assert await templates.render("a", PLAIN, ASKED) == "refused " * 4
    finally:
        del templates._known["a", PLAIN, ()]


@pytest.mark.parametrize("name", UNUSABLE)
async def test_template_that_renders_no_conversation_is_refused(templates: TenantTemplates, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await templates.check("a", UNUSABLE[name])
    assert (caught.value.param, caught.value.code) == ("chat_template", "chat_template_refused")
    assert "template" in caught.value.message


async def test_long_template_is_refused(templates: TenantTemplates) -> None:
    with pytest.raises(InvalidRequest, match="longer than"):
        await templates.check("a", PLAIN + "x" * MAX_TEMPLATE_CHARS)


async def test_check_names_the_features(templates: TenantTemplates) -> None:
    chatml = await templates.check("a", CHATML)
    assert (chatml.tools, chatml.arguments_as_text) == (True, False)
    assert (chatml.thinking_switch, chatml.reasoning_efforts) == ("enable_thinking", ())
    text = await templates.check("a", CHATML.replace("arguments | tojson", "''"))
    assert text.arguments_as_text
    single = await templates.check("a", "{{ messages[0].content }}{{ reasoning_effort }}{% if thinking %}!{% endif %}")
    assert not single.tools
    assert (single.thinking_switch, single.reasoning_efforts) == ("thinking", ("low", "medium", "high"))


@pytest.mark.parametrize(
    ("source", "forms"),
    [
        (PLAIN, ("text", "text", "text", "text")),
        ("{{ messages | tojson }}", ("text", "text", "text", "text")),
        (HEADERS, ("text", "text", "text", "text")),
        (CHATML, ("text", "as_sent", "text", "text")),
        (PARTS, ("parts", "parts", "parts", "parts")),
        (FIRST_PART, ("one_part", "one_part", "one_part", "one_part")),
        (EITHER, ("as_sent", "as_sent", "as_sent", "as_sent")),
        (BY_ROLE, ("text", "parts", "text", "text")),
        ("{{ messages[-1].content[0].text }}", ("one_part", "one_part", "one_part", "one_part")),
    ],
    ids=[
        *("strings", "everything as JSON", "trimmed strings", "both for the user", "parts", "first part", "both"),
        *("by role", "one message"),
    ],
)
async def test_check_finds_the_form_of_each_roles_content(
    templates: TenantTemplates, source: str, forms: tuple[ContentForm, ...]
) -> None:
    system, user, assistant, tool = forms
    features = await templates.check("a", source)
    assert features.content == ContentForms(system=system, user=user, assistant=assistant, tool=tool)
    base = ChatTemplate({"default": source}, SPECIAL_TOKENS)
    assert base.features() == features


async def test_slow_template_delays_only_its_own_tenant(templates: TenantTemplates) -> None:
    await templates.render("b", PLAIN, ASKED)
    # One after another, they would take ten seconds of processor time.
    slow = [asyncio.ensure_future(templates.render("a", ENDLESS, ASKED)) for _ in range(4 * NUM_PROCESSES)]
    await asyncio.sleep(0.05)
    for _ in range(len(slow) + 1):
        await templates.render("b", PLAIN, ASKED)
    # On a busy machine, some of them may have ended, but not one for each rendering of the other tenant.
    assert not slow[-1].done()
    for one in slow:
        one.cancel()
    # The next turn starts when the running rendering ends.
    await templates.render("a", PLAIN, ASKED)


async def test_more_slow_tenants_than_processes_leave_a_process_to_others(templates: TenantTemplates) -> None:
    slow = [
        asyncio.ensure_future(templates.render(f"slow{tenant}", ENDLESS, ASKED))
        for tenant in range(2 * NUM_PROCESSES)
        for _ in range(4)
    ]
    await asyncio.sleep(0)
    for _ in range(5):
        assert await templates.render("quick", PLAIN, ASKED) == "Hello 🦊"
    assert any(not one.done() for one in slow), "each takes half a second of processor time"
    for one in slow:
        one.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_requests_that_were_cancelled_do_not_free_their_tenants_turn() -> None:
    templates = TenantTemplates({})

    async def hang_up() -> None:
        asking = asyncio.ensure_future(templates.render("a", ENDLESS, ASKED))
        await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    for _ in range(2 * NUM_PROCESSES):
        await hang_up()
        assert len(templates._pool._idle) >= NUM_PROCESSES - 1
    assert await templates.render("b", PLAIN, ASKED) == "Hello 🦊"
    # The next turn starts when the running rendering ends.
    await templates.render("a", PLAIN, ASKED)
    templates.close()


def test_an_upload_is_checked_and_not_kept(templates: TenantTemplates) -> None:
    templates.check_upload(PLAIN)
    with pytest.raises(AdapterRejected) as rejected:
        templates.check_upload(ENDLESS)
    assert rejected.value.code == "invalid_template"
    # The next upload is another tenant's.
    templates.check_upload(PLAIN)
    assert ("(uploads)", PLAIN, ()) not in templates._known


async def test_the_event_loop_runs_while_templates_do(templates: TenantTemplates) -> None:
    num_turns = 0
    async with asyncio.timeout(60):
        # On a busy machine, this process can miss most of a rendering.
        while num_turns <= 20:
            slow = asyncio.ensure_future(templates.render("a", ENDLESS, ASKED))
            num_turns = 0
            while not slow.done():
                await asyncio.sleep(0.005)
                num_turns += 1
            assert isinstance(slow.exception(), InvalidRequest)


async def test_a_tenant_cannot_queue_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    templates = TenantTemplates({}, max_waiting_per_tenant=3)
    # Until all have asked, no rendering ends.
    all_asked = threading.Event()
    keep = templates._kept_answer

    def keep_once_all_asked(*arguments: Any) -> TemplateAnswer:
        assert all_asked.wait(60)
        return keep(*arguments)

    monkeypatch.setattr(templates, "_kept_answer", keep_once_all_asked)
    asked = [asyncio.ensure_future(templates.render("a", PLAIN, ASKED)) for _ in range(5)]
    other = asyncio.ensure_future(templates.render("b", PLAIN, ASKED))
    await asyncio.sleep(0)
    all_asked.set()
    assert await other == "Hello 🦊"
    done = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in done] == [str] * 3 + [RateLimited] * 2
    assert await templates.render("a", PLAIN, ASKED) == "Hello 🦊"
    templates.close()


async def test_compiled_templates_are_kept_for_each_tenant(templates: TenantTemplates) -> None:
    for number in range(MAX_KEPT_PER_TENANT + 2):
        await templates.render("c", f"{PLAIN}{number}", ASKED)
    kept = [key for key in templates._known if key[0] == "c"]
    assert [source for _, source, _ in kept] == [f"{PLAIN}{number}" for number in range(2, MAX_KEPT_PER_TENANT + 2)]
    assert await templates.render("c", f"{PLAIN}2", ASKED) == "Hello 🦊2"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ],
    ids=["reserved variable", "no messages", "two endings", "unpaired surrogate"],
)
async def test_bad_request_is_refused_by_name(templates: TenantTemplates, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await templates.render("a", PLAIN, **{"messages": ASKED, **options})
    assert caught.value.param == param


async def test_deep_history_is_refused(templates: TenantTemplates) -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        await templates.render("a", PLAIN, [{"role": "user", "content": deep}])


STARVED = """
import time
from loramux.adapter_store.sandbox.fork_server import fork_for_each_request
fork_for_each_request(idle_s=None)
time.sleep(60)
"""
"""A worker whose forks get no processor time, as on a machine that is too busy."""


async def test_a_busy_machine_makes_no_template_too_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUICK", "FULL"):
        monkeypatch.setattr(templates_module, name, replace(getattr(templates_module, name), wall_s=0.05))
    templates = TenantTemplates({}, command=(sys.executable, "-S", "-c", STARVED))
    try:
        with pytest.raises(Unavailable) as failure:
            await templates.render("a", PLAIN, ASKED)
        assert failure.value.code == "templates_unavailable"
    finally:
        templates.close()


async def test_missing_process_is_a_temporary_failure() -> None:
    templates = TenantTemplates({}, command=("/nonexistent",))
    with pytest.raises(Unavailable):
        await templates.render("a", PLAIN, ASKED)
    templates.close()


async def test_templates_are_not_rendered_without_a_required_sandbox() -> None:
    if CALLS in missing_measures():
        pytest.skip("this machine cannot imitate a lesser one")
    command = (sys.executable, lesser_kernel.__file__, FILES, *templates_module._WORKER[2:])
    templates = TenantTemplates({}, command=command, is_sandbox_required=True)
    try:
        with structlog.testing.capture_logs() as entries, pytest.raises(InvalidRequest):
            await templates.render("a", PLAIN, ASKED)
        assert "this machine has no landlock" in str(entries)
    finally:
        templates.close()
