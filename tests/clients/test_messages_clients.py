"""Unmodified clients of Anthropic's Messages API against a running server: `make test-clients`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.test_clients import DEMO, ENVIRONMENT, TOOL_MODELS, Stand, output_of
from tests.conformance.served import deployment

pytestmark = pytest.mark.campaign

PYTHON = str(ENVIRONMENT / "bin" / "python")
CALL = ["get_weather", {"city": "Rome"}]
OFFICIAL = {
    "anthropic (Python)": [PYTHON, "anthropic_python.py"],
    "anthropic (Node)": [shutil.which("node") or "node", "anthropic_node.cjs"],
}
FRAMEWORKS = {
    "langchain-anthropic": [PYTHON, "anthropic_langchain.py"],
    "litellm": [PYTHON, "anthropic_litellm.py"],
}


@pytest.fixture(scope="module")
def messages_stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A server with the tools demo. The tenant `limited` can use its models with one request per five seconds."""
    made = deployment(DEMO / "tools" / "base", tmp_path_factory.mktemp("messages"), ("--dtype", "float32"), {})
    with made.running():
        keys = []
        for slug in ("harbour", "limited"):
            made.json("tenants", "create", slug)
            keys.append(made.json("keys", "create", "--tenant", slug)["secret"])
        for model in TOOL_MODELS:
            name = model.partition("/")[2]
            made.json(
                "adapters", "push", str(DEMO / "tools" / "adapters" / name), "--tenant", "harbour", "--name", name
            )
            made.command("grants", "add", model, "--tenant", "limited")
        limit = ("--metric", "requests_per_minute", "--limit", "12", "--burst", "1")
        assert made.command("quotas", "set", "--tenant", "limited", *limit).returncode == 0
        yield Stand(made, *keys)


@pytest.fixture(scope="module", params=[(client, model) for client in OFFICIAL for model in TOOL_MODELS], ids=str)
def official(request: pytest.FixtureRequest, messages_stand: Stand) -> tuple[str, dict[str, Any]]:
    client, model = request.param
    return model, output_of(messages_stand, *OFFICIAL[client], model)


def test_a_call_is_answered_whole_and_streamed(official: tuple[str, dict[str, Any]]) -> None:
    model, seen = official
    for way in ("plain", "thinking"):
        loop = seen[way]
        # The template of one adapter has no thinking.
        thinking = ["thinking"] if way == "thinking" and model == TOOL_MODELS[0] else []
        expected = {"blocks": [*thinking, "tool_use"], "reason": "tool_use", "call": CALL}
        assert loop["whole"].items() >= expected.items()
        assert loop["streamed"] == loop["whole"]
        assert loop["is streamed"]
        assert loop["answer"]["reason"] == "end_turn"
        assert loop["answer"]["blocks"] == [*thinking, "text"]
        assert "It is sunny in Rome" in loop["answer"]["text"]
    assert seen["together"] == [seen["plain"]["whole"]] * 4


def test_models_are_listed_in_pages(official: tuple[str, dict[str, Any]]) -> None:
    model, seen = official
    assert seen["models"] == sorted(["demo-base", *TOOL_MODELS])
    assert seen["model"] == model


@pytest.mark.parametrize(
    ("what", "kind", "status", "error"),
    [
        ("unknown model", "NotFoundError", 404, "not_found_error"),
        ("wrong key", "AuthenticationError", 401, "authentication_error"),
        ("wrong call", "BadRequestError", 400, "invalid_request_error"),
    ],
)
def test_an_error_of_the_messages_api_is_the_clients_own_class(
    official: tuple[str, dict[str, Any]], what: str, kind: str, status: int, error: str
) -> None:
    assert official[1][what] == [kind, status, error, True]


def test_a_limit_of_the_messages_api_is_told(official: tuple[str, dict[str, Any]]) -> None:
    seen = official[1]
    assert seen["limit"] == {"status": 429, "retry after": True}
    assert seen.get("retries", 3) == 3


def test_further_fields_of_the_python_client(official: tuple[str, dict[str, Any]]) -> None:
    model, seen = official
    if "version" not in seen:
        pytest.skip("the Node client sends the same requests")
    whole = seen["plain"]["whole"]
    assert seen["bearer"] == seen["old version"] == whole
    assert seen["count"] == whole["usage"]
    assert seen["forced"]["call"] == CALL
    assert seen["none"]["blocks"] == ["text"]
    assert sorted(seen["structured"]) == ["city"]
    assert seen["left"]
    # The tokens of the markers count, too.
    assert seen["budget"] is None or 5 <= seen["budget"] <= 8
    assert (seen["budget"] is not None) == (model == TOOL_MODELS[0])


@pytest.mark.parametrize("model", TOOL_MODELS)
@pytest.mark.parametrize("client", FRAMEWORKS)
def test_a_framework_calls_a_tool_through_the_messages_api(client: str, model: str, messages_stand: Stand) -> None:
    seen = output_of(messages_stand, *FRAMEWORKS[client], model)
    for way in ("whole", "streamed"):
        assert seen[way]["call"] == CALL
        assert "It is sunny in Rome" in seen[way]["answer"]
        assert seen[way]["usage"] > 0
    assert seen["streamed"]["is streamed"]
    assert seen.get("passed through", {"call": CALL, "reason": "tool_use"}) == {"call": CALL, "reason": "tool_use"}
