from __future__ import annotations

from typing import Any

import pytest
from starlette.routing import Match

from loramux.platform.requests import request_life

pytestmark = pytest.mark.anyio

BODIES = {
    "/v1/completions": {"model": "base", "prompt": [5], "max_tokens": 2},
    "/v1/chat/completions": {"model": "base", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}
each_path = pytest.mark.parametrize("path", BODIES)


@each_path
async def test_callers_without_a_key_are_refused(gateway: Any, path: str) -> None:
    answer = await gateway.http.post(path, json=BODIES[path], headers={"authorization": ""})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "missing_api_key")
    assert answer.headers["x-request-id"].startswith("req_")
    assert gateway.engine.adds == []


@each_path
async def test_other_methods_are_refused_by_the_app(gateway: Any, path: str) -> None:
    answer = await gateway.http.put(path, json=BODIES[path])
    allowed = "POST" if path == "/v1/completions" else "GET, POST"
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/responses/resp_1", "DELETE, GET"),
        ("/v1/conversations/conv_1", "DELETE, GET, POST"),
        ("/v1/files", "GET, POST"),
        ("/v1/models/acme/support", "DELETE, GET"),
        ("/health", "GET, HEAD"),
    ],
)
async def test_a_refused_method_names_all_methods_of_the_path(gateway: Any, path: str, allowed: str) -> None:
    answer = await gateway.http.patch(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


@each_path
async def test_an_error_that_nobody_expects_is_an_envelope_too(
    gateway: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr(request_life, "make_plan", fail)
    answer = await gateway.http.post(path, json=BODIES[path])
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "a bug" not in answer.text


@pytest.mark.parametrize("host", ["gateway", "gateway:8000", "llm.example.com"])
async def test_redirect_keeps_the_scheme_that_only_the_proxy_knows(gateway: Any, host: str) -> None:
    # The proxy terminates TLS and is not trusted, so the server believes that the scheme is http.
    version = await gateway.http.get("/version/?a=b", headers={"host": host})
    assert (version.status_code, version.headers["location"]) == (307, "/version?a=b")
    for path, body in BODIES.items():
        answer = await gateway.http.post(f"{path}/", json=body, headers={"host": host})
        assert (answer.status_code, answer.headers["location"]) == (307, path)


async def test_models_are_listed_with_a_slash_too(gateway: Any) -> None:
    listed = await gateway.http.get("/v1/models/")
    assert (listed.status_code, listed.json()) == (200, (await gateway.http.get("/v1/models")).json())


async def test_redirect_never_leads_to_another_server(gateway: Any) -> None:
    for path in ("//evil.example/", "//evil.example/v1/models/", "/v1/models//evil.example/"):
        answer = await gateway.http.get(f"http://gateway{path}")
        assert not answer.headers.get("location", "").startswith("//"), path


@each_path
async def test_direct_calls_are_declared_as_routes(gateway: Any, path: str) -> None:
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
    matched = [route for route in gateway.app.routes if route.matches(dict(scope))[0] == Match.FULL]
    assert len(matched) == 1
