from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.platform.gateways import Gateway
from tests.platform.messages_api.test_message_errors import message, post

pytestmark = pytest.mark.anyio

PREFIX = "anthropic-ratelimit-"


def limits_of(response: Any, begun: datetime) -> dict[str, str]:
    """Return Anthropic's headers after checking the resets, which are times, and the rest against OpenAI's headers."""
    found = {name[len(PREFIX) :]: value for name, value in response.headers.items() if name.startswith(PREFIX)}
    for kind in {name.partition("-")[0] for name in found}:
        for what in ("limit", "remaining"):
            assert found[f"{kind}-{what}"] == response.headers[f"x-ratelimit-{what}-{kind}"]
        reset = datetime.strptime(found.pop(f"{kind}-reset"), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        wait = timedelta(seconds=int(response.headers[f"x-ratelimit-reset-{kind}"].removesuffix("s")))
        assert begun + wait - timedelta(seconds=1) <= reset <= datetime.now(UTC) + wait
    return found


async def test_answers_and_refusals_tell_limits_as_anthropic_does(gateway: Gateway) -> None:
    begun = datetime.now(UTC)
    assert limits_of(await post(gateway), begun) == {}
    gateway.limit("requests_per_minute", 2)
    gateway.limit("tokens_per_minute", 10_000)
    whole, streamed = await post(gateway), await post(gateway, stream=True)
    for response, remaining in ((whole, "1"), (streamed, "0")):
        assert response.status_code == 200
        told = limits_of(response, begun)
        assert (told["requests-limit"], told["requests-remaining"], told["tokens-limit"]) == ("2", remaining, "10000")
    refused = await post(gateway)
    assert refused.status_code == 429
    assert limits_of(refused, begun)["requests-remaining"] == "0"


async def test_other_surfaces_have_only_openais_headers(gateway: Gateway) -> None:
    gateway.limit("requests_per_minute", 2)
    body = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    response = await gateway.http.post("/v1/chat/completions", json=body)
    assert response.headers["x-ratelimit-limit-requests"] == "2"
    assert not [name for name in response.headers if name.startswith(PREFIX)]
    await message(gateway)
