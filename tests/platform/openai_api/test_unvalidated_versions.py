"""A version that is not valid for the served base is refused before quota is reserved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import select, update

from loramux.adapter_store.registry.bases import Bases, note_validated
from loramux.migrations.schema import adapter_versions, version_bases
from tests.platform.gateways import Gateway

pytestmark = pytest.mark.anyio

BASE_ID = "b" * 64
BODY = {"model": "support", "prompt": "Hello", "max_tokens": 1}


@pytest.fixture
def decide(gateway: Gateway) -> Callable[[str], None]:
    """Serve another base than the one that accepted the tenant's version, and decide on the version for it."""
    gateway.add_adapter("acme", "support")
    bases = Bases(gateway.database)
    bases.register("a" * 64, "base")
    bases.register(BASE_ID, "base")
    gateway.services.callers.resolver._registry.base_id = BASE_ID

    def decide(state: str) -> None:
        with gateway.database.write() as connection:
            version_id = connection.execute(select(adapter_versions.c.id)).scalar_one()
            note_validated(connection, version_id, BASE_ID, 1)
            columns = version_bases.c
            connection.execute(update(version_bases).where(columns.base_id == BASE_ID).values(state=state))

    return decide


@pytest.mark.parametrize(
    ("state", "says", "is_retried"),
    [
        (None, "not been validated yet", True),
        ("validating", "not been validated yet", True),
        ("rejected", "is not valid", False),
    ],
    ids=["unseen", "in progress", "rejected"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models/support"])
async def test_an_unvalidated_version_is_refused(
    gateway: Gateway, decide: Callable[[str], None], state: str | None, says: str, is_retried: bool, path: str
) -> None:
    gateway.limit("requests_per_minute", 1)
    if state is not None:
        decide(state)
    for _ in range(2):
        is_get = path.startswith("/v1/models")
        response = await (gateway.http.get(path) if is_get else gateway.http.post(path, json=BODY))
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (409, "adapter_not_validated", "model")
        assert "acme/support@1" in error["message"]
        assert says in error["message"]
        assert ("retry-after" in response.headers) is is_retried
    assert gateway.engine.adds == []
    assert gateway.usage() == []
    # No quota was used: the one request of the minute is left.
    assert (await gateway.http.post("/v1/completions", json={**BODY, "model": "base"})).status_code == 200
    assert [model["id"] for model in (await gateway.http.get("/v1/models")).json()["data"]] == ["base"]


async def test_a_validated_version_is_served(gateway: Gateway, decide: Callable[[str], None]) -> None:
    decide("ready")
    assert (await gateway.http.post("/v1/completions", json=BODY)).status_code == 200
    listed = [model["id"] for model in (await gateway.http.get("/v1/models")).json()["data"]]
    assert listed == ["base", "acme/support"]


async def test_other_tenants_learn_nothing_of_the_version(gateway: Gateway, decide: Callable[[str], None]) -> None:
    headers = {"authorization": f"Bearer {gateway.key_of('other')}"}
    answers = [
        await gateway.http.post("/v1/completions", json={**BODY, "model": name}, headers=headers)
        for name in ("acme/support", "acme/nothing")
    ]
    refusals = [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]
    assert refusals == [(404, "model_not_found")] * 2
