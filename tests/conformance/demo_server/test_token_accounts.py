"""Every token that an engine commits is billed or counted as discarded, whatever the request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loramux.admin.client.client import AdminClient
from loramux.admin.client.push import push_adapter
from tests.adapter_store.waiting import wait_until
from tests.conformance.served import Deployment
from tests.demo_base import DEMO_BASE

PROMPT = "What should I do on a rainy day?"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 8}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
METRICS = (
    "loramux_running_requests",
    "loramux_engine_running_sequences",
    "loramux_engine_waiting_sequences",
    "loramux_tokens_total",
    "loramux_engine_tokens_total",
)
LONG = {"ignore_eos": True, "max_tokens": 100}
LONGEST = {"prompt": PROMPT, "ignore_eos": True, "max_tokens": 950, "n": 8}
"""The answers fill the context, so that no machine finishes them before a test looks."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """The three sums since the server started: in the ledger, in the gateway's counter, and in the engine's."""

    billed: int
    discarded: int
    committed: int

    def __sub__(self, other: Accounts) -> Accounts:
        return Accounts(self.billed - other.billed, self.discarded - other.discarded, self.committed - other.committed)


@dataclass(frozen=True, slots=True)
class Stand:
    deployment: Deployment
    key: str
    stop: str
    """A text in the middle of the answer to PROMPT."""
    end_id: int
    """A token in the middle of the answer to PROMPT."""

    def accounts(self) -> Accounts:
        """Wait until no request is running, then read the sums."""
        metrics: dict[tuple[str, str], float] = {}

        def is_idle() -> bool:
            metrics.update(self._metrics())
            running = ("loramux_running_requests", "loramux_engine_running_sequences")
            waiting = "loramux_engine_waiting_sequences"
            return not any(value for (name, _), value in metrics.items() if name in (*running, waiting))

        wait_until(is_idle)
        with AdminClient(f"http://127.0.0.1:{self.deployment.admin_port}", self.deployment.admin_key) as operator:
            billed = sum(event["completion_tokens"] for event in operator.items("usage/events"))
        return Accounts(
            billed,
            int(metrics["loramux_tokens_total", "discarded"]),
            int(metrics["loramux_engine_tokens_total", "completion"]),
        )

    def call(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        with self.http() as http:
            return http.post(f"/v1/{path}", json={"model": "harbour/pirate", "temperature": 0, **body}, **options)

    def http(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.deployment.port}",
            headers={"authorization": f"Bearer {self.key}"},
            timeout=60,
            trust_env=False,
            verify=False,
        )

    def _metrics(self) -> dict[tuple[str, str], float]:
        url = f"http://127.0.0.1:{self.deployment.admin_port}/metrics"
        lines = httpx.get(url, trust_env=False, verify=False, timeout=10).text.splitlines(keepends=True)
        # Parsing all metrics takes longer than most requests.
        shown = "".join(line for line in lines if line.startswith(METRICS))
        return {
            (sample.name, next(iter(sample.labels.values()), "")): sample.value
            for family in text_string_to_metric_families(shown)
            for sample in family.samples
        }


@pytest.fixture(scope="module")
def stand(demo_server: Deployment) -> Stand:
    made = demo_server
    with AdminClient(f"http://127.0.0.1:{made.admin_port}", made.admin_key) as operator:
        operator.post("tenants", {"slug": "harbour"})
        key = operator.post("api_keys", {"tenant": "harbour"})["secret"]
        push_adapter(operator, DEMO_BASE.parent / "adapters" / "pirate", "harbour", "pirate")
    answer = Stand(made, key, "", 0).call("completions", {"prompt": PROMPT, "return_token_ids": True, **LONG})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return Stand(made, key, choice["text"][30:36], choice["token_ids"][20])


@pytest.fixture(scope="module")
def at_start(stand: Stand) -> Accounts:
    """The sums before the first test of this module. Other modules' evals are not billed."""
    return stand.accounts()


def answered(path: str, *, can_stream: bool = True, **body: Any) -> Callable[[Stand], None]:
    """Send a request, whole and as a stream. Both must succeed, and the usage must be the bill."""

    def send(stand: Stand) -> None:
        given = {
            name: {"STOP": stand.stop, "STOPS": ["never", stand.stop], "END": [stand.end_id]}.get(value, value)
            if isinstance(value, str)
            else value
            for name, value in body.items()
        }
        before = stand.accounts()
        answer = stand.call(path, given)
        assert answer.status_code == 200, answer.text
        after = stand.accounts()
        assert (after - before).billed == answer.json()["usage"]["completion_tokens"]
        if can_stream:
            streamed = stand.call(path, {**given, "stream": True})
            assert streamed.status_code == 200, streamed.text
            assert streamed.text.endswith("data: [DONE]\n\n")

    return send


def completion(**body: Any) -> Callable[[Stand], None]:
    return answered("completions", prompt=PROMPT, **body)


def chat(**body: Any) -> Callable[[Stand], None]:
    return answered("chat/completions", messages=[{"role": "user", "content": PROMPT}], **body)


def refused(path: str, status: int, **body: Any) -> Callable[[Stand], None]:
    def send(stand: Stand) -> None:
        answer = stand.call(path, body)
        assert answer.status_code == status, answer.text

    return send


def disconnected(stand: Stand) -> None:
    """Leave in mid-stream."""
    for num_lines in (1, 9):
        body = {"model": "harbour/pirate", "prompt": PROMPT, "stream": True, "n": 3, **LONG}
        with stand.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            for _ in range(num_lines):
                next(lines)


def disconnected_whole(stand: Stand) -> None:
    """Leave before a whole answer."""
    for timeout_s in (0.05, 0.2):
        with pytest.raises(httpx.ReadTimeout):
            stand.call("completions", LONGEST, timeout=timeout_s)


def cancelled(stand: Stand) -> None:
    """An administrator cancels the request."""
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(stand.call("completions", LONGEST)))
    asking.start()
    with AdminClient(f"http://127.0.0.1:{stand.deployment.admin_port}", stand.deployment.admin_key) as operator:
        deadline = time.monotonic() + 30
        while not (running := list(operator.items("requests"))):
            assert time.monotonic() < deadline
        operator.post(f"requests/{running[0]['id']}/cancel", {})
    asking.join()
    assert answers[0].status_code >= 400


def together(stand: Stand) -> None:
    """Many kinds in one batch."""
    kinds = [
        {"stop": stand.stop},
        {"echo": True, "max_tokens": 0},
        {"n": 3, "stop": [stand.stop]},
        {"stop_token_ids": [stand.end_id]},
        {"guided_json": SCHEMA},
        {"n": 2, "best_of": 3},
    ]
    with ThreadPoolExecutor(12) as threads:
        sent = [threads.submit(stand.call, "completions", {"prompt": PROMPT, **LONG, **kind}) for kind in kinds * 4]
        assert {one.result().status_code for one in sent} == {200}


KINDS: dict[str, Callable[[Stand], None]] = {
    "length": completion(max_tokens=20),
    "one token": completion(max_tokens=1),
    "end of sequence": completion(max_tokens=400),
    "stop string": completion(stop="STOP", **LONG),
    "several stop strings": completion(stop="STOPS", **LONG),
    "shown stop string": completion(stop="STOP", include_stop_str_in_output=True, **LONG),
    "stop string after min_tokens": completion(stop="STOP", min_tokens=60, **LONG),
    "stop string that ends the last token": completion(stop="STOP", max_tokens=20, ignore_eos=True),
    "stop string and logprobs": completion(stop="STOP", logprobs=2, **LONG),
    "stop token": completion(stop_token_ids="END", **LONG),
    "several choices": completion(n=3, max_tokens=20),
    "several choices with a stop string": completion(n=3, temperature=1.0, seed=7, stop="STOP", **LONG),
    "best of several": completion(best_of=3, n=1, max_tokens=20, can_stream=False),
    "several prompts": answered("completions", prompt=[PROMPT, "Hello", "A ship"], stop="STOP", **LONG),
    "token ids": answered("completions", prompt=[5, 6, 7, 8], max_tokens=20),
    "echo": completion(echo=True, max_tokens=20),
    "echo alone": completion(echo=True, max_tokens=0),
    "echo alone of several prompts": answered("completions", prompt=[PROMPT, "Hello"], echo=True, max_tokens=0),
    "echo alone with logprobs": completion(echo=True, max_tokens=0, logprobs=1, can_stream=False),
    "prompt logprobs": completion(prompt_logprobs=1, max_tokens=8, can_stream=False),
    "regex": completion(guided_regex="[a-c]{3,9}", **LONG),
    "choice": completion(guided_choice=["red", "green"], **LONG),
    "schema": completion(guided_json=SCHEMA, **LONG),
    "schema with a stop string": completion(guided_json=SCHEMA, stop='"', **LONG),
    "allowed tokens": completion(allowed_token_ids=[300, 301, 302], max_tokens=20),
    "bad words": completion(bad_words=["the"], max_tokens=20),
    "chat": chat(max_tokens=20),
    "chat with a stop string": chat(stop="a", **LONG),
    "chat with several choices": chat(n=3, stop="e", temperature=1.0, seed=3, **LONG),
    "chat with a schema": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, **LONG
    ),
    "base": answered("completions", model="demo-base", prompt=PROMPT, stop="a", **LONG),
    "no token allowed": refused("completions", 400, prompt=PROMPT, allowed_token_ids=[300], bad_words=[[300]], **LONG),
    "unknown field": refused("completions", 400, prompt=PROMPT, nothing=1),
    "too long": refused("completions", 400, prompt=PROMPT, max_tokens=10**6),
    "disconnected stream": disconnected,
    "disconnected answer": disconnected_whole,
    "cancelled": cancelled,
    "together": together,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_committed_token_is_billed_or_discarded(stand: Stand, at_start: Accounts, name: str) -> None:
    before = stand.accounts()
    KINDS[name](stand)
    # The engine's last report may still be on its way to the gateway.
    for _ in range(50):
        spent = stand.accounts() - before
        if spent.billed + spent.discarded == spent.committed:
            break
        time.sleep(0.1)
    assert spent.billed + spent.discarded == spent.committed
    if name in ("length", "end of sequence", "several choices", "schema", "chat", "best of several", "stop token"):
        assert spent.discarded == 0


def test_the_sums_of_all_kinds_are_equal(stand: Stand, at_start: Accounts) -> None:
    total = stand.accounts() - at_start
    assert total.billed + total.discarded == total.committed
    assert total.discarded > 20
