"""Tenants whose requests are costly to check or to follow, each with a plain request of the same length.

A polite tenant's latency beside the costly requests is compared with its latency beside as many plain ones and beside
nothing: an idle core is late to wake up, so that refused requests would seem to do harm.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import httpx

from tests.adversary.stand import ADAPTER, CHATTER, COSTLY_WORD, HUGE_WORD, Account, Stand

Body = dict[str, Any]

AMBIGUOUS = 'start: e "!"\ne: e e e | e e | /[ab]/'
"""The time for a token grows with the cube of the answer's length, because the answer never ends."""
BLOW_UP = "([ab]*a[ab]{14}x)+"
"""A regex whose automaton has many states, each computed when an answer first reaches it."""
MAX_TOKENS = 300
CALL_S = 1.0
"""Shortest time between two requests of a place in a flood, in seconds, so that costly ones that fail are no more."""


class Beside(Enum):
    """What the other tenants send while the polite tenant is timed."""

    COSTLY = auto()
    PLAIN = auto()
    NOTHING = auto()


@dataclass(frozen=True, slots=True)
class TenantFlood:
    """`costly` and `plain` make the bodies of requests to `path`. `polite` is what the polite tenant sends."""

    path: str
    costly: Callable[[Stand, random.Random], Body]
    plain: Callable[[Stand, random.Random], Body]
    num_tenants: int = 1
    num_at_once: int = 2
    """Requests in flight per tenant."""
    polite: dict[str, Any] = field(default_factory=dict)


async def flood(stand: Stand, one: TenantFlood, beside: Beside, dice: random.Random, seconds: float) -> Counter[str]:
    """Send the flood's requests for about `seconds`. Count responses by status and error code."""
    counts: Counter[str] = Counter()
    if beside is Beside.NOTHING:
        await asyncio.sleep(seconds)
        return counts
    until_s = time.monotonic() + seconds
    make = one.costly if beside is Beside.COSTLY else one.plain
    async with httpx.AsyncClient(base_url=stand.url, trust_env=False, timeout=60) as http:

        async def repeat(account: Account) -> None:
            headers = {"authorization": f"Bearer {account.key}"}
            while time.monotonic() < until_s:
                next_s = time.monotonic() + CALL_S
                try:
                    async with asyncio.timeout(max(0.1, until_s - time.monotonic())):
                        answer = await http.post(one.path, headers=headers, json=make(stand, dice))
                    counts[_name(answer)] += 1
                    await asyncio.sleep(next_s - time.monotonic())
                except TimeoutError:
                    counts["left at the end"] += 1

        await asyncio.gather(*(repeat(account) for account in stand.crowd[: one.num_tenants] * one.num_at_once))
    return counts


def _name(answer: httpx.Response) -> str:
    if answer.is_success:
        return str(answer.status_code)
    return f"{answer.status_code} {json.loads(answer.text)['error']['code']}"


def _completion(dice: random.Random, **fields: Any) -> Body:
    return {"model": ADAPTER, "prompt": [dice.randrange(3, 500) for _ in range(16)], "max_tokens": MAX_TOKENS, **fields}


def _plain(dice: random.Random, **fields: Any) -> Body:
    return _completion(dice, ignore_eos=True, **fields)


def _ambiguous(n: int) -> Callable[[Stand, random.Random], Body]:
    def make(stand: Stand, dice: random.Random) -> Body:
        return _completion(dice, n=n, guided_grammar=AMBIGUOUS, logit_bias={stand.bang: -100})

    return make


def _choices(stand: Stand, dice: random.Random) -> Body:
    start = dice.randrange(10**6)
    return _completion(dice, guided_choice=[f"{start + n} {'ab' * 40} {n}" for n in range(1000)])


def _wide_schema(dice: random.Random, num_properties: int, is_new: bool) -> Body:
    name = f"p{dice.randrange(10**9)}" if is_new else "property"
    properties = {f"{name}_{number}": {"type": "string"} for number in range(num_properties)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _wide(dice: random.Random, num_properties: int, is_new: bool) -> Body:
    schema = _wide_schema(dice, num_properties, is_new)
    return _completion(dice, guided_json=schema, min_tokens=MAX_TOKENS)


def _chat(dice: random.Random, model: str, words: str, **fields: Any) -> Body:
    content = f"{words} {dice.randrange(10**9)}"
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": MAX_TOKENS, **fields}


def _tools(dice: random.Random) -> Body:
    """A chat that must call one of eight new functions, each with 150 optional arguments."""
    schemas = [_wide_schema(dice, 150, is_new=True) for _ in range(8)]
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": one}} for n, one in enumerate(schemas)]
    return _chat(dice, ADAPTER, "hello", max_tokens=40, tools=tools, tool_choice="required")


def _costly_template(stand: Stand, dice: random.Random) -> Body:
    return _chat(dice, CHATTER, dice.choice((COSTLY_WORD, COSTLY_WORD, HUGE_WORD)), max_tokens=8)


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NEW_SCHEMA = {"path": COMPLETIONS, "kind": "new schema", "requests_per_s": 3.0}
OWN_TEMPLATE = {"path": CHAT, "kind": "chat", "model": CHATTER}

TENANT_FLOODS: dict[str, TenantFlood] = {
    "ambiguous grammar": TenantFlood(COMPLETIONS, _ambiguous(1), lambda _, dice: _plain(dice)),
    "ambiguous grammar, n = 16": TenantFlood(
        COMPLETIONS, _ambiguous(16), lambda _, dice: _plain(dice, n=16), num_at_once=1
    ),
    "costly regex": TenantFlood(
        COMPLETIONS, lambda _, dice: _completion(dice, n=4, guided_regex=BLOW_UP), lambda _, dice: _plain(dice, n=4)
    ),
    "long choices": TenantFlood(COMPLETIONS, _choices, lambda _, dice: _plain(dice, max_tokens=40)),
    "wide schema": TenantFlood(
        COMPLETIONS, lambda _, dice: _wide(dice, 400, is_new=False), lambda _, dice: _plain(dice), num_at_once=4
    ),
    "new schemas of 2 tenants": TenantFlood(
        COMPLETIONS,
        lambda _, dice: _wide(dice, dice.choice((400, 2500)), is_new=True),
        lambda _, dice: _plain(dice),
        num_tenants=2,
        polite=NEW_SCHEMA,
    ),
    "new schemas of 5 tenants": TenantFlood(
        COMPLETIONS,
        lambda _, dice: _wide(dice, dice.choice((400, 2500)), is_new=True),
        lambda _, dice: _plain(dice),
        num_tenants=5,
        polite=NEW_SCHEMA,
    ),
    "ambiguous grammar, streamed chat": TenantFlood(
        CHAT,
        lambda stand, dice: _chat(
            dice, ADAPTER, "hello", stream=True, guided_grammar=AMBIGUOUS, logit_bias={stand.bang: -100}
        ),
        lambda _, dice: _chat(dice, ADAPTER, "hello", stream=True, ignore_eos=True),
    ),
    "schemas of tools": TenantFlood(
        CHAT,
        lambda _, dice: _tools(dice),
        lambda _, dice: _chat(dice, ADAPTER, "hello", max_tokens=40, ignore_eos=True),
        num_tenants=2,
        polite=NEW_SCHEMA,
    ),
    "templates of 6 tenants": TenantFlood(
        CHAT,
        _costly_template,
        lambda _, dice: _chat(dice, CHATTER, "hello", max_tokens=8),
        num_tenants=6,
        num_at_once=4,
        polite=OWN_TEMPLATE,
    ),
}
