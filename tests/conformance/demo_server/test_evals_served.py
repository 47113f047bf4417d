"""Evals on `loramux serve` with the demo's models: real scores, a dead server, and other requests beside them."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.admin.demo.prompts import DEMO_PROMPTS
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import EngineConfig, pack_target
from loramux.engine.offline.local_adapter import read_adapter
from loramux.engine.quantizing.quality import divergence, log_probabilities
from tests.conformance.served import Deployment, deployment
from tests.demo_base import DEMO_BASE

ADAPTERS = DEMO_BASE.parent / "adapters"


@pytest.fixture(scope="module")
def served(demo_server: Deployment) -> Deployment:
    push(demo_server)
    return demo_server


def push(made: Deployment) -> None:
    made.json("tenants", "create", "acme")
    for adapter in ("json", "pirate"):
        # Both are versions of one adapter, so that they can be compared.
        made.json("adapters", "push", str(ADAPTERS / adapter), "--tenant", "acme", "--name", "parcels")


def write(path: Path, cases: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(case) for case in cases))
    return str(path)


def asked(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def test_adapter_is_better_than_another_at_its_own_task(served: Deployment, tmp_path: Path) -> None:
    cases = [{"messages": asked(prompt), "schema": {"type": "object"}, "max_tokens": 48} for prompt in DEMO_PROMPTS]
    file = write(tmp_path / "json.jsonl", cases)
    found = served.json("eval", "acme/parcels@1", file, "--compare", "2")
    assert (found["state"], found["score"], found["compare_score"]) == ("done", 1.0, 0.0)
    # The operator's evals are not charged.
    assert served.json("usage", "--tenant", "acme", "--format", "json")["data"] == []
    assert "1.000 json.jsonl" in served.command("adapters", "show", "acme/parcels").stdout
    served.json("adapters", "promote", "acme/parcels@1", "--require-eval", file, "--min-score", "0.9")
    refused = served.command("adapters", "promote", "acme/parcels@2")
    assert (refused.returncode, "has no finished eval of json.jsonl" in refused.stderr) == (1, True)


def test_likelihood_is_the_models_own(served: Deployment, tmp_path: Path) -> None:
    reference = '{"answer":'
    tokenizer = AutoTokenizer.from_pretrained(DEMO_BASE)
    base = AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, ADAPTERS / "json")
    cases, expected = [], []
    for prompt in DEMO_PROMPTS[:3]:
        text = tokenizer.apply_chat_template(asked(prompt), tokenize=False, add_generation_prompt=True)
        context = tokenizer(text, add_special_tokens=False).input_ids
        wanted = tokenizer(reference, add_special_tokens=False).input_ids
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([context + wanted])).logits[0, :-1], -1)
        scored = [logprobs[len(context) - 1 + at, token].item() for at, token in enumerate(wanted)]
        expected.append(math.exp(sum(scored) / len(scored)))
        cases.append({"messages": asked(prompt), "reference": reference})
    found = served.json("eval", "acme/parcels@1", write(tmp_path / "likely.jsonl", cases))
    assert [answer["score"] for answer in found["answers"]] == pytest.approx(expected, abs=1e-4)


def test_divergence_of_a_shared_cache_is_the_models_own(served: Deployment, tmp_path: Path) -> None:
    num_own = 6
    tokenizer = AutoTokenizer.from_pretrained(DEMO_BASE)
    config = EngineConfig(model_dir=str(DEMO_BASE), blob_url="", cache_dir="", dtype="bfloat16", num_threads=1)
    target = pack_target(ModelConfig.load(DEMO_BASE), config.dtype)
    adapter = read_adapter(ADAPTERS / "json", target, BaseWeights(DEMO_BASE), None, {}).packed
    cases = [{"messages": asked(prompt), "reference": '{"answer":'} for prompt in DEMO_PROMPTS[:2]]
    file = write(tmp_path / "shared.jsonl", cases)
    found = served.json("eval", "acme/parcels@1", file, "--share-base-cache", str(num_own))
    measured = [one["divergence"] for one in found["answers"] if one["shared"]]
    assert found["divergence"] == pytest.approx(sum(measured) / len(measured), abs=1e-5)
    for prompt, nats in zip(DEMO_PROMPTS, measured, strict=False):
        text = tokenizer.apply_chat_template(asked(prompt), tokenize=False, add_generation_prompt=True)
        context = tokenizer(text, add_special_tokens=False).input_ids
        wanted = tokenizer('{"answer":', add_special_tokens=False).input_ids
        exact, other = (
            log_probabilities(config, (*context, *wanted), adapter, activation=start)[len(context) - 1 : -1]
            for start in (0, len(context) - num_own)
        )
        # The eval knows only the likeliest tokens, so it finds a little less.
        assert 0.8 * divergence(exact, other) <= nats <= 1.02 * divergence(exact, other)
    assert min(measured) > 0.001


@pytest.mark.campaign
def test_killed_servers_eval_continues_beside_other_requests(tmp_path: Path) -> None:
    made = deployment(DEMO_BASE, tmp_path / "data", (), {})
    cases = [{"messages": asked(prompt), "contains": "{", "max_tokens": 32} for prompt in DEMO_PROMPTS * 8]
    with made.running() as server:
        push(made)
        started = made.json("eval", "acme/parcels@1", write(tmp_path / "long.jsonl", cases), "--no-wait")
        path = f"evals show {started['id']}".split()
        while not (seen := made.json(*path))["num_answers"]:
            time.sleep(0.05)
        children = [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]
        server.kill()
        for pid in children:
            # The engine notices the death by itself. The test does not wait for that.
            os.kill(pid, signal.SIGKILL)
    assert seen["state"] == "running"
    with made.running():
        key = made.json("keys", "create", "--tenant", "acme")["secret"]
        with made.client(key) as client:
            answer = client.chat.completions.create(model="acme/parcels@2", messages=asked("Who are you?"))
        assert answer.choices[0].message.content
        deadline = time.monotonic() + 120
        while (found := made.json(*path))["state"] in ("queued", "running") and time.monotonic() < deadline:
            time.sleep(0.2)
    assert (found["state"], found["num_answers"], found["score"]) == ("done", len(cases), 1.0)
    assert [one["line"] for one in found["answers"]] == list(range(1, len(cases) + 1))
