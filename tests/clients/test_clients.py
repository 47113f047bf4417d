"""Unmodified third-party clients against a running server: `make test-clients`.

Each client's script makes the same requests in the client's own way and prints what it received. The answers are
compared with each other and with a plain HTTP call, and the final bill with the usage reported to the clients.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.conformance.served import Deployment, deployment

pytestmark = pytest.mark.campaign

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv-clients"
CLIENTS = {
    "openai (Python, litellm's)": [str(ENVIRONMENT / "bin" / "python"), "openai_python.py"],
    "openai (Python, ours)": [sys.executable, "openai_python.py"],
    "openai (Node)": [shutil.which("node") or "node", "openai_node.cjs"],
    "litellm": [str(ENVIRONMENT / "bin" / "python"), "litellm_python.py"],
    "langchain-openai": [str(ENVIRONMENT / "bin" / "python"), "langchain_python.py"],
}
STORING_CLIENTS = {
    "openai (Python, litellm's)": [str(ENVIRONMENT / "bin" / "python"), "openai_stored.py"],
    "openai (Python, ours)": [sys.executable, "openai_stored.py"],
    "openai (Node)": [shutil.which("node") or "node", "openai_stored.cjs"],
}
TOOL_CLIENTS = {
    "openai (Python, litellm's)": [str(ENVIRONMENT / "bin" / "python"), "openai_tools.py"],
    "openai (Python, ours)": [sys.executable, "openai_tools.py"],
    "openai (Node)": [shutil.which("node") or "node", "openai_tools.cjs"],
    "litellm": [str(ENVIRONMENT / "bin" / "python"), "litellm_tools.py"],
    "langchain-openai": [str(ENVIRONMENT / "bin" / "python"), "langchain_tools.py"],
}
AGENT_CLIENTS = {
    "AI SDK": [shutil.which("node") or "node", "ai_sdk.mjs"],
    "openai-agents (Node)": [shutil.which("node") or "node", "agents_node.cjs"],
    "pydantic-ai": [str(ENVIRONMENT / "pydantic-ai" / "bin" / "python"), "pydantic_ai_python.py"],
}
DEMO = HERE.parents[1] / "admin" / "demo"
PIRATE = DEMO / "adapters" / "pirate"
MODEL = "harbour/pirate"
TOOL_MODELS = ("harbour/sailor", "harbour/concierge")
"""One uses the base's chat template. The other has its own."""
LIMIT = ("--metric", "requests_per_minute", "--limit", "12", "--burst", "1")


@dataclass(frozen=True)
class Stand:
    """A running server, a key without limits, a key limited to one request per five seconds, and a key of a tenant
    whose answers are stored.
    """

    deployment: Deployment
    key: str
    limited_key: str
    storing_key: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.deployment.port}/v1"


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory, demo_base: Path) -> Iterator[Stand]:
    environment = {"LORAMUX_RESPONSE_KEY": "a key of at least 32 characters."}
    made = deployment(demo_base, tmp_path_factory.mktemp("clients"), (), environment)
    with made.running():
        keys = []
        for slug in ("harbour", "limited", "storing"):
            made.json("tenants", "create", slug)
            keys.append(made.json("keys", "create", "--tenant", slug)["secret"])
        pushed = made.json("adapters", "push", str(PIRATE), "--tenant", "harbour", "--name", "pirate")
        assert pushed["model"] == MODEL
        for slug in ("limited", "storing"):
            made.command("grants", "add", MODEL, "--tenant", slug)
        assert made.command("tenants", "set", "storing", "--response-days", "1").returncode == 0
        assert made.command("quotas", "set", "--tenant", "limited", *LIMIT).returncode == 0
        yield Stand(made, *keys)


@pytest.fixture(scope="module")
def tool_stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    made = deployment(DEMO / "tools" / "base", tmp_path_factory.mktemp("tool-clients"), ("--dtype", "float32"), {})
    with made.running():
        keys = []
        for slug in ("harbour", "limited"):
            made.json("tenants", "create", slug)
            keys.append(made.json("keys", "create", "--tenant", slug)["secret"])
        assert made.command("quotas", "set", "--tenant", "limited", *LIMIT).returncode == 0
        for model in TOOL_MODELS:
            name = model.partition("/")[2]
            folder = DEMO / "tools" / "adapters" / name
            pushed = made.json("adapters", "push", str(folder), "--tenant", "harbour", "--name", name)
            assert pushed["model"] == model
            made.command("grants", "add", model, "--tenant", "limited")
        yield Stand(made, *keys)


@pytest.fixture(scope="module")
def plain(stand: Stand) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 48,
    }
    headers = {"authorization": f"Bearer {stand.key}"}
    answer = httpx.post(f"{stand.url}/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.fixture(scope="module", params=CLIENTS, ids=str)
def seen(request: pytest.FixtureRequest, stand: Stand) -> dict[str, Any]:
    return output_of(stand, *CLIENTS[request.param])


def output_of(stand: Stand, program: str, script: str, tool_model: str = "") -> dict[str, Any]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("LORAMUX_", "PYTHON"))},
        "CLIENT_URL": stand.url,
        "CLIENT_KEY": stand.key,
        "CLIENT_LIMITED_KEY": stand.limited_key,
        "CLIENT_STORING_KEY": stand.storing_key,
        "CLIENT_MODEL": MODEL,
        "CLIENT_TOOL_MODEL": tool_model,
        "CLIENT_MODULES": str(ENVIRONMENT / "node"),
        # Otherwise litellm would fetch a price table from the network.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(
        [program, str(HERE / script)], env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_an_answer_and_its_usage_come_whole_and_streamed(seen: dict[str, Any], plain: dict[str, Any]) -> None:
    choice, total = plain["choices"][0], plain["usage"]["total_tokens"]
    text = choice["message"]["content"]
    assert (seen["text"], seen["reason"], seen["usage"]) == (text, choice["finish_reason"], total)
    for stream, usage in (("stream", None), ("stream with usage", total)):
        assert (seen[stream]["text"], seen[stream]["is streamed"]) == (text, True)
        if stream == "stream with usage":
            assert seen[stream]["usage"] == usage
            assert seen[stream].get("usage comes last", True)


def test_logprobs_choices_stops_and_completions_agree_with_the_plain_answer(
    seen: dict[str, Any], plain: dict[str, Any]
) -> None:
    text = plain["choices"][0]["message"]["content"]
    # The token that ends the answer also has an entry.
    assert seen["logprobs"] == text + ("<|end|>" if plain["choices"][0]["finish_reason"] == "stop" else "")
    assert seen.get("logprobs are whole", True) is True
    assert seen["n"] in ([0, 1, 2], 3)
    assert seen["stop"] == [text.partition("capital")[0], "stop"]
    assert set(seen["together"]) == set(seen.get("in a batch", [text])) == {text}
    assert seen.get("max_completion_tokens", text) == text
    assert seen["completion"].strip()
    assert seen.get("completion stream", seen["completion"]) == seen["completion"]
    assert seen.get("left", True)
    assert MODEL in seen.get("models", [MODEL])
    assert seen.get("model", MODEL) == MODEL


def test_a_response_is_the_same_answer(seen: dict[str, Any], plain: dict[str, Any]) -> None:
    if "response" not in seen:
        pytest.skip("this client's script does not call the Responses API")
    response, text, usage = seen["response"], plain["choices"][0]["message"]["content"], plain["usage"]["total_tokens"]
    assert (response["text"], response["deltas"], response["is streamed"]) == (text, text, True)
    assert (response["usage"], response["streamed usage"], response["stored"]) == (usage, usage, False)
    assert response["kinds"] == ["response.created", "response.in_progress", "response.completed"]
    assert response["structured"]["city"] in ("Paris", "Rome")
    assert response["previous"][:3] == ["NotFoundError", 404, "previous_response_not_found"]


@pytest.mark.parametrize("client", STORING_CLIENTS)
def test_stored_answers_conversations_and_the_background(client: str, stand: Stand, plain: dict[str, Any]) -> None:
    seen = output_of(stand, *STORING_CLIENTS[client])
    text, question = plain["choices"][0]["message"]["content"], "What is the capital of France?"
    assert seen["chats"] == {
        "text": text,
        "messages": [question],
        "listed": True,
        "filtered": True,
        "deleted": [True] * 3,
        "missing": True,
    }
    assert seen["conversation"] == {
        "text": text,
        "referred": text,
        "roles": ["user", "assistant"],
        "is of it": True,
        "deleted": True,
        "missing": True,
    }
    # On a busy machine, the long answer can fill the context before the cancellation arrives.
    assert seen["background"].pop("cancelled") in ("cancelled", "response_finished")
    assert seen["background"] == {
        "first": "queued",
        "status": "completed",
        "text": text,
        "streamed": text,
        "numbers": True,
        "last": "response.completed",
    }


def test_a_batch_has_the_same_answer(seen: dict[str, Any], plain: dict[str, Any]) -> None:
    if "batch" not in seen:
        pytest.skip("this client's script does not run a batch")
    batch, text, usage = seen["batch"], plain["choices"][0]["message"]["content"], plain["usage"]["total_tokens"]
    assert (batch["status"], batch["metadata"]) == ("completed", {"job": "test"})
    assert batch["counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert (batch["text"], batch["usage"], batch["errors"]) == ([text], [usage], [["bad", 404]])
    assert (batch["is listed"], batch["file"], batch["files left"]) == (True, True, 0)
    assert batch["cancelled"][:3] == ["ConflictError", 409, "batch_not_open"]


def test_embeddings_are_those_of_a_plain_call(seen: dict[str, Any], stand: Stand, plain: dict[str, Any]) -> None:
    if "embeddings" not in seen:
        pytest.skip("this client's script makes no embeddings")
    found = seen["embeddings"]
    body = {"model": MODEL, "input": ["What is the capital of France?", "Yes"]}
    headers = {"authorization": f"Bearer {stand.key}"}
    answer = httpx.post(f"{stand.url}/embeddings", json=body, headers=headers, timeout=60).json()
    expected = [pytest.approx(one["embedding"], abs=1e-6) for one in answer["data"]]
    assert found["vectors"] == expected
    assert found.get("as numbers", expected) == expected
    assert found["usage"] == answer["usage"]["total_tokens"]
    assert found.get("dimensions", 4) == 4


def test_coheres_clients_embed_and_rank(stand: Stand) -> None:
    seen = output_of(stand, str(ENVIRONMENT / "bin" / "python"), "cohere_python.py")
    body = {"model": MODEL, "input": ["What is the capital of France?", "Yes"]}
    headers = {"authorization": f"Bearer {stand.key}"}
    plain = httpx.post(f"{stand.url}/embeddings", json=body, headers=headers, timeout=60).json()
    expected = [pytest.approx(one["embedding"], abs=1e-6) for one in plain["data"]]
    assert seen["vectors"] == expected
    assert [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in seen["base64"]] == expected
    assert seen["vectors of version 1"] == expected * 50
    assert seen["tokens"] == plain["usage"]["total_tokens"]
    assert seen["dimensions"] == [4, 4]
    assert seen["ranked"] == 1
    assert seen["errors"] == [["NotFoundError", 404], ["UnauthorizedError", 401], ["TooManyRequestsError", 429]]


def test_litellm_ranks_responds_and_runs_a_batch(stand: Stand, plain: dict[str, Any]) -> None:
    seen = output_of(stand, *CLIENTS["litellm"])
    text = plain["choices"][0]["message"]["content"]
    assert seen["ranked"] == [1, "What is the capital of France?", 1.0]
    assert seen["litellm's response"] == {"text": text, "deltas": text, "is streamed": True}
    assert seen["litellm's batch"] == {"status": "completed", "text": text}


def test_a_structured_answer_is_parsed(seen: dict[str, Any]) -> None:
    fact = seen["structured"]
    assert (sorted(fact), fact["city"] in ("Paris", "Rome"), type(fact["is_capital"])) == (
        ["city", "is_capital"],
        True,
        bool,
    )


def test_instructor_receives_valid_models_whole_and_streamed(stand: Stand) -> None:
    seen = output_of(stand, str(ENVIRONMENT / "bin" / "python"), "instructor_python.py")
    fact = seen["structured"]
    assert sorted(fact) == ["city", "is_capital", "mayors"]
    assert fact["city"] in ("Paris", "Rome")
    assert seen["last part"] == fact
    assert seen["parts"] > 3
    assert seen["usage"] > 0


@pytest.mark.parametrize(
    ("what", "kind", "status", "code"),
    [
        ("unknown model", "NotFoundError", 404, "model_not_found"),
        ("wrong key", "AuthenticationError", 401, "invalid_api_key"),
        ("wrong call", "BadRequestError", 400, None),
    ],
)
def test_an_error_is_the_clients_own_class(
    seen: dict[str, Any], what: str, kind: str, status: int, code: str | None
) -> None:
    if what not in seen:
        pytest.skip("this client validates its own arguments")
    assert seen[what][:2] == [kind, status]
    if len(seen[what]) > 2:
        assert seen[what][2] == code if code else seen[what][2]
        assert seen[what][4], "the client exposes the request ID"


def test_a_limit_is_told_and_waited_for(seen: dict[str, Any]) -> None:
    limit = seen["limit"]
    if isinstance(limit, dict):
        assert limit == {**limit, "status": 429, "code": "rate_limit_exceeded", "retry after": True}
    else:
        assert limit == ["RateLimitError", 429]
    retries = seen.get("retries", 3)
    assert retries == 3 or retries == {"num answers": 3, "waited": True}


@pytest.mark.parametrize("model", TOOL_MODELS)
@pytest.mark.parametrize("client", TOOL_CLIENTS)
def test_a_call_is_answered_with_its_result(client: str, model: str, tool_stand: Stand) -> None:
    seen = output_of(tool_stand, *TOOL_CLIENTS[client], model)
    for way in ("auto", "whole", "parsed", "streamed"):
        if way not in seen:
            continue
        loop = seen[way]
        assert (loop["name"], loop["arguments"]) == ("get_weather", {"city": "Rome"})
        # Clients that join chunks return an empty string for missing text.
        assert not loop["content"]
        if way == "auto":
            assert "It is sunny in Rome" in loop["answer"]
        else:
            # With `tool_choice` `none`, the model sees no tools, so the answer of this small model is arbitrary.
            assert loop["answer"].strip()
            assert loop["answer"] == seen["whole"]["answer"]
            assert loop["usage"] == seen["whole"]["usage"] > 0
    assert seen["streamed"].get("is streamed", True)
    assert seen.get("deltas are the arguments", True)
    assert seen.get("reason") == seen.get("streamed reason")


@pytest.mark.parametrize("model", TOOL_MODELS)
def test_an_agent_calls_its_tool_and_ends(model: str, tool_stand: Stand) -> None:
    seen = output_of(tool_stand, str(ENVIRONMENT / "bin" / "python"), "agents_python.py", model)
    assert seen["given"] == ["Rome"] * 6
    for surface in ("default", "responses", "chat"):
        for way in ("whole", "streamed"):
            assert seen[surface][way]["turns"] == 2
            assert seen[surface][way]["answer"] == seen["chat"]["whole"]["answer"]
        assert seen[surface]["streamed"]["is streamed"]
    assert "It is sunny in Rome" in seen["chat"]["whole"]["answer"]


@pytest.mark.parametrize("model", TOOL_MODELS)
@pytest.mark.parametrize("client", AGENT_CLIENTS)
def test_a_framework_calls_its_tool_continues_and_reads_errors(client: str, model: str, tool_stand: Stand) -> None:
    seen = output_of(tool_stand, *AGENT_CLIENTS[client], model)
    surfaces = {name: seen[name] for name in ("chat", "responses", "compatible") if name in seen}
    # Whether a follow-up calls the tool again is up to the model.
    assert set(seen["given"]) == {"Rome"}
    assert len(seen["given"]) >= 2 * len(surfaces)
    for found in surfaces.values():
        assert "It is sunny in Rome" in found["whole"]["answer"]
        assert found["streamed"] == {**found["whole"], "is streamed": True}
        assert found["next"].strip()
        assert found["structured"] in ("Paris", "Rome")
    assert seen["errors"] == [404, 401]
    assert seen["waited"]


@pytest.mark.parametrize("model", TOOL_MODELS)
def test_the_llm_command_runs_its_function_and_answers(model: str, tool_stand: Stand) -> None:
    seen = output_of(tool_stand, str(ENVIRONMENT / "bin" / "python"), "llm_tools.py", model)
    assert seen["calls"] == [["get_weather", {"city": "Rome"}]]
    for way in ("streamed", "whole"):
        assert "It is sunny in Rome" in seen[way]
    assert seen["structured"]["city"] in ("Paris", "Rome")
