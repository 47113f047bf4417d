from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loramux.adapter_store.formats.files.file_names import GENERATION_FILE
from loramux.adapter_store.formats.version_files.generation_config import SETTINGS, SamplingDefaults
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.engine.scheduling.request_limits import sampling_problem
from loramux.migrations.database import Database
from loramux.platform.openai_api.completion_request import CompletionRequest
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

BASE = SamplingDefaults(temperature=0.25, top_p=0.5, top_k=7, max_new_tokens=5)
OWN = b'{"temperature": 0.0, "repetition_penalty": 1.5, "max_new_tokens": 3}'


@pytest.fixture(params=[True, False], ids=["auto", "off"])
async def own_gateway(
    request: pytest.FixtureRequest, accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor
) -> AsyncIterator[Gateway]:
    """A gateway with sampling defaults for the base and for the adapter `acme/support`, enabled or not."""
    settings = GatewaySettings(base_defaults=BASE, applies_adapter_defaults=request.param)
    async with open_gateway(accounts, tokenizer, threads, settings) as gateway:
        gateway.add_adapter("acme", "support", files={GENERATION_FILE: OWN})
        yield gateway


async def sent(gateway: Gateway, model: str, **fields: Any) -> Add:
    seen: list[Add] = []

    def script(add: Add) -> Script:
        seen.append(add)
        return Script(token_ids=(5,))

    gateway.engine.script = script
    response = await gateway.http.post("/v1/completions", json={"model": model, "prompt": "Yes", **fields})
    assert response.status_code == 200, response.text
    [add] = seen
    return add


async def test_omitted_fields_take_the_nearest_default(own_gateway: Gateway) -> None:
    base = await sent(own_gateway, "base")
    assert (base.sampling.temperature, base.sampling.top_p, base.sampling.top_k) == (0.25, 0.5, 7)
    assert (base.sampling.repetition_penalty, base.max_tokens) == (1.0, 5)
    own = await sent(own_gateway, "support")
    if own_gateway.services.settings.applies_adapter_defaults:
        assert (own.sampling.temperature, own.sampling.repetition_penalty, own.max_tokens) == (0.0, 1.5, 3)
        assert (own.sampling.top_p, own.sampling.top_k) == (0.5, 7)
    else:
        assert (own.sampling, own.max_tokens) == (base.sampling, base.max_tokens)


async def test_fields_of_the_request_win(own_gateway: Gateway) -> None:
    fields = {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "max_tokens": 9}
    for model in ("base", "support"):
        add = await sent(own_gateway, model, **fields)
        assert add.sampling == SamplingParams(temperature=1.0, top_p=0.9, top_k=0)
        assert add.max_tokens == 9


async def test_default_limit_never_exceeds_the_context(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor
) -> None:
    settings = GatewaySettings(base_defaults=SamplingDefaults(max_new_tokens=10_000))
    async with open_gateway(accounts, tokenizer, threads, settings) as gateway:
        add = await sent(gateway, "base")
        assert len(add.prompt) + add.max_tokens == gateway.services.max_model_len


def extremes() -> Iterator[Any]:
    for name, bounds in SETTINGS.items():
        for value in (bounds.least, bounds.most):
            yield pytest.param(name, value, id=f"{name}={value:g}")


@pytest.mark.parametrize(("name", "value"), [*extremes()])
def test_every_default_within_its_bounds_is_one_that_the_engine_accepts(name: str, value: float) -> None:
    body = CompletionRequest(model="base", prompt="x")
    params = body.sampling(SamplingDefaults(**{name: value}))  # type: ignore[arg-type]
    assert sampling_problem(params, 1024) is None
