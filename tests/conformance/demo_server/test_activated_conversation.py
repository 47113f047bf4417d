"""Four activated adapters continue a conversation of the base. Its prefix is computed once and billed as cached."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conformance.served import Deployment
from tests.demo_base import DEMO_BASE

SOURCES = {"pirate": "pirate", "formal": "formal", "json": "json", "stern": "formal"}
"""The demo's adapters that provide the weights of the four adapters."""
PROMPT_TOKENS = 'loramux_engine_tokens_total{kind="prompt"}'
NUM_CONVERSATION, NUM_ANSWER, NUM_CHECKED, PAGE = 960, 12, 16, 16


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_BASE)


@pytest.fixture(scope="module")
def invocations(tokenizer: Any) -> dict[str, list[int]]:
    texts = {name: f" {name} check:" for name in SOURCES}
    return {name: tokenizer.encode(text, add_special_tokens=False) for name, text in texts.items()}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory, invocations: dict[str, list[int]]) -> dict[str, Path]:
    """Each adapter as peft saves it."""
    made = {}
    for name, source in SOURCES.items():
        directory = made[name] = tmp_path_factory.mktemp("adapters") / name
        shutil.copytree(DEMO_BASE.parent / "adapters" / source, directory)
        config = json.loads((directory / "adapter_config.json").read_text())
        config["alora_invocation_tokens"] = invocations[name]
        (directory / "adapter_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def served(demo_server: Deployment, directories: dict[str, Path]) -> Deployment:
    demo_server.json("tenants", "create", "scribe")
    for name, directory in directories.items():
        demo_server.json("adapters", "push", str(directory), "--tenant", "scribe", "--name", name)
    return demo_server


def conversation_of(tokenizer: Any) -> list[int]:
    """A conversation between a user and the base, 960 tokens long."""
    turns = "".join(
        f"<|user|>What is parcel {number}?<|end|><|assistant|>Parcel {number} is a box of {number + 3} lamps.<|end|>"
        for number in range(36)
    )
    ids: list[int] = tokenizer.encode("<|bos|>" + turns, add_special_tokens=False)[:NUM_CONVERSATION]
    assert len(ids) == NUM_CONVERSATION
    return ids


def test_the_conversation_is_computed_once(
    served: Deployment, directories: dict[str, Path], invocations: dict[str, list[int]], tokenizer: Any
) -> None:
    client = served.client(served.json("keys", "create", "--tenant", "scribe")["secret"])
    conversation = conversation_of(tokenizer)

    def answer(model: str, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
        made = client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        assert made.usage is not None
        assert made.usage.prompt_tokens == len(prompt)
        assert made.usage.prompt_tokens_details is not None
        token_ids: list[int] = made.choices[0].model_extra["token_ids"]  # type: ignore[index]
        return token_ids, made.usage.prompt_tokens_details.cached_tokens or 0

    before = computed_tokens(served)
    said, num_cached = answer("demo-base", conversation, NUM_ANSWER)
    assert num_cached == 0
    continued = [*conversation, *said]
    answers = {}
    for name in SOURCES:
        answers[name], num_cached = answer(name, [*continued, *invocations[name]], NUM_CHECKED)
        # The last token of the base's answer has no K and V, and the last page is not full.
        assert num_cached == (len(continued) - 1) // PAGE * PAGE == NUM_CONVERSATION
    num_rests = sum(NUM_ANSWER + len(tokens) for tokens in invocations.values())
    assert computed_tokens(served) - before == NUM_CONVERSATION + num_rests

    assert answers == {name: generated(directories[name], [*continued, *invocations[name]]) for name in SOURCES}
    # Without the invocation, the base answers, and finds its own pages.
    unasked, num_cached = answer("pirate", continued, NUM_CHECKED)
    assert unasked == generated(None, continued)
    assert num_cached == NUM_CONVERSATION
    assert unasked[: NUM_CHECKED // 2] != answers["pirate"][: NUM_CHECKED // 2]

    report = served.command("usage", "--tenant", "scribe", "--group-by", "model", "--format", "json")
    assert report.returncode == 0, report.stderr
    billed = {one["model"]: one for bucket in json.loads(report.stdout)["data"] for one in bucket["results"]}
    assert billed["demo-base"]["cached_tokens"] == 0
    for name in ("formal", "json", "stern"):
        one = billed[f"scribe/{name}@1"]
        assert one["cached_tokens"] == NUM_CONVERSATION
        assert one["prompt_tokens"] == len(continued) + len(invocations[name])
        assert one["completion_tokens"] == NUM_CHECKED


def test_an_alias_with_the_same_position_answers_like_the_activated_adapter(
    served: Deployment, invocations: dict[str, list[int]], tokenizer: Any
) -> None:
    invocation = invocations["pirate"]
    served.json(
        "adapters", "push", str(DEMO_BASE.parent / "adapters" / "pirate"), "--tenant", "scribe", "--name", "plain"
    )
    promoted = ("adapters", "promote", "scribe/plain@1", "--share-base-cache", str(len(invocation)))
    assert served.json(*promoted)["share_base_cache"] == len(invocation)
    prompt = [tokenizer.convert_tokens_to_ids("<|bos|>"), *conversation_of(tokenizer), *invocation]
    answers = {}
    for model in ("pirate", "plain", "plain@1"):
        client = served.client(served.json("keys", "create", "--tenant", "scribe")["secret"])
        made = client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=NUM_CHECKED,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        assert made.usage is not None
        assert made.usage.prompt_tokens_details is not None
        answers[model] = made.choices[0].model_extra["token_ids"], made.usage.prompt_tokens_details.cached_tokens or 0  # type: ignore[index]
    num_shared = (len(prompt) - len(invocation)) // PAGE * PAGE
    assert answers["plain"] == (answers["pirate"][0], num_shared)
    assert answers["plain@1"][0] != answers["plain"][0]
    assert answers["plain@1"][1] == 0, "a version computes whole prompts"


def test_a_version_shows_its_invocation_tokens(served: Deployment, invocations: dict[str, list[int]]) -> None:
    shown = served.json("adapters", "show", "scribe/stern@1")
    assert shown["invocation_tokens"] == invocations["stern"]
    versions = {name: served.json("adapters", "show", f"scribe/{name}@1") for name in ("formal", "stern")}
    # Equal weights with different invocations are different versions.
    assert versions["formal"]["digest"] != versions["stern"]["digest"]
    done = served.command("adapters", "show", "scribe/stern@1")
    assert " ".join(map(str, invocations["stern"])) in done.stdout


def computed_tokens(served: Deployment) -> int:
    """Number of prompt tokens computed since the engine started."""
    headers = {"authorization": f"Bearer {served.admin_key}"}
    text = httpx.get(f"http://127.0.0.1:{served.admin_port}/metrics", headers=headers).text
    [line] = [line for line in text.splitlines() if line.startswith(PROMPT_TOKENS)]
    return int(float(line.split()[-1]))


def generated(directory: Path | None, prompt: list[int]) -> list[int]:
    """The greedy continuation by peft, which ignores the end-of-sequence token. None stands for the base."""
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    if directory is not None:
        model = PeftModel.from_pretrained(model, directory)
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": NUM_CHECKED, "do_sample": False, "eos_token_id": None}
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer
