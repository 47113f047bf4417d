"""The time to the first token over HTTP does not tell a tenant which prompts another tenant has sent."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.conformance.demo_adapters import DEMO
from tests.conformance.served import deployment
from tests.reliability.record import recorded
from tests.reliability.test_side_channels import Probes

NUM_PAIRS = int(os.environ.get("LORAMUX_HTTP_SIDE_CHANNEL_PAIRS", "500"))
PROMPT_LEN = 480
TENANTS = ("victim", "attacker")


class Caller:
    """A tenant with one connection, as an attacker who wants exact times has."""

    def __init__(self, port: int, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Send a prompt. Return the seconds until its first token, and the number of cached tokens."""
        body = {"model": "demo-base", "prompt": prompt, "max_tokens": 1, "ignore_eos": True, "stream": True}
        sent = json.dumps(body | {"stream_options": {"include_usage": True}})
        started_s = time.perf_counter()
        self._connection.request("POST", "/v1/completions", sent, self._headers)
        response = self._connection.getresponse()
        assert response.status == 200, response.read()
        response.readline()
        took_s = time.perf_counter() - started_s
        [usage] = [line for line in response.read().splitlines() if b'"usage":{' in line]
        return took_s, json.loads(usage.removeprefix(b"data: "))["usage"]["prompt_tokens_details"]["cached_tokens"]

    def close(self) -> None:
        self._connection.close()


def probe(port: int, keys: dict[str, str], num_pairs: int) -> dict[str, Probes]:
    """For each pair, the victim sends a prompt. Then both tenants send that prompt and a new one, in random order."""
    dice = random.Random(num_pairs)

    def draw() -> list[int]:
        return dice.choices(range(3, 500), k=PROMPT_LEN)

    found = {tenant: Probes() for tenant in TENANTS}
    with closing(Caller(port, keys["victim"])) as victim, closing(Caller(port, keys["attacker"])) as attacker:
        callers = {"victim": victim, "attacker": attacker}
        for _ in range(num_pairs):
            known = draw()
            victim.first_token(known)
            sent = [(tenant, is_known) for tenant in TENANTS for is_known in (True, False)]
            dice.shuffle(sent)
            for tenant, is_known in sent:
                took_s, num_cached = callers[tenant].first_token(known if is_known else draw())
                (found[tenant].known_s if is_known else found[tenant].new_s).append(took_s)
                found[tenant].num_cached += num_cached
    return found


@pytest.mark.campaign
@pytest.mark.timeout(600 + NUM_PAIRS)
def test_only_the_tenant_itself_finds_its_prompts_in_the_cache(tmp_path: Path) -> None:
    # Few tokens fit into a step, so that a prompt that is not cached takes many steps.
    made = deployment(DEMO / "base", tmp_path / "data", (), {"LORAMUX_MAX_BATCH_TOKENS": "64"})
    with made.running(tmp_path / "server.log"):
        keys = {}
        for tenant in TENANTS:
            made.json("tenants", "create", tenant)
            keys[tenant] = made.json("keys", "create", "--tenant", tenant)["secret"]
        found = probe(made.port, keys, NUM_PAIRS)
    with recorded(
        "http-side-channels",
        pairs=NUM_PAIRS,
        other_tenant_auc=found["attacker"].auc,
        same_tenant_auc=found["victim"].auc,
    ):
        assert found["attacker"].num_cached == 0
        assert found["victim"].num_cached >= NUM_PAIRS * PROMPT_LEN / 2
