from __future__ import annotations

from collections import Counter

import pytest

from loramux.engine.protocol.messages import Stats, StatsRequest
from loramux.platform.replicas.claim_checks import DISTRUST_S, MAX_FAILURES, ClaimChecks
from loramux.platform.routing.views import digest_prefix
from tests.platform.ready_adapters import digest_of
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio
DIGESTS = [digest_of(str(number)) for number in range(100)]
EVERYTHING = frozenset(map(digest_prefix, DIGESTS))


async def holding(num_adapters: int) -> Stats:
    engine = ScriptedEngine()
    engine.resident = dict.fromkeys(DIGESTS[:num_adapters], 1)
    return await engine.call(StatsRequest(), 1.0)


async def test_server_that_claims_everything_loses_its_claims_for_a_while() -> None:
    clock_s, refusals = 0.0, Counter[str]()
    checks = ClaimChecks(lambda reason: refusals.update([reason]), lambda: clock_s)
    honest, liar = await holding(90), await holding(3)
    for _ in range(MAX_FAILURES - 1):
        checks.note("liar", EVERYTHING, liar)
    checks.note("liar", EVERYTHING, honest)
    for _ in range(MAX_FAILURES - 1):
        checks.note("liar", EVERYTHING, liar)
        checks.note("honest", EVERYTHING, honest)
    assert checks.is_trusted("liar"), "only failures in a row count"
    checks.note("liar", EVERYTHING, liar)
    assert not checks.is_trusted("liar")
    assert checks.is_trusted("honest")
    assert refusals == {"claims": 1}
    clock_s = DISTRUST_S
    assert checks.is_trusted("liar")


async def test_few_claims_are_not_judged() -> None:
    checks = ClaimChecks(lambda reason: None, lambda: 0.0)
    for _ in range(10 * MAX_FAILURES):
        checks.note("small", frozenset({1, 2, 3}), await holding(0))
    assert checks.is_trusted("small")
