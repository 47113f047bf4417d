"""The whole path through `loramux serve`, on SQLite with local blobs and on PostgreSQL with S3."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import httpx
import numpy as np
import openai
import pytest
import torch
from moto.server import ThreadedMotoServer
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from loramux.admin.demo.prompts import DEMO_PROMPTS
from tests.adapter_store.waiting import wait_until
from tests.conformance.documented_metrics import documented, exposed
from tests.conformance.served import Deployment, deployment

DEMO = Path(__file__).parents[2] / "admin" / "demo"
ADAPTERS = {"harbour": "pirate", "chambers": "formal", "parcels": "json"}
BUCKET = "loramux-test"
PROMPTS = DEMO_PROMPTS[:3]


@dataclass(frozen=True)
class Stand:
    deployment: Deployment
    keys: dict[str, str]
    blobs: Any
    """A function that lists the blob store's keys."""


@pytest.fixture(
    scope="module",
    params=[pytest.param("sqlite and local blobs", marks=pytest.mark.campaign), "postgres and s3"],
)
def stand(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres_server: str
) -> Iterator[Stand]:
    directory = tmp_path_factory.mktemp("served")
    if request.param.startswith("sqlite"):
        blob_dir = directory / "data" / "blobs"
        made = deployment(DEMO / "base", directory / "data", (), {})

        def list_files() -> list[str]:
            return sorted(str(path.relative_to(blob_dir)) for path in blob_dir.rglob("*") if path.is_file())

        yield from serve(made, list_files)
        return
    s3 = ThreadedMotoServer(port=0, verbose=False)
    s3.start()
    host, port = s3.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    bucket = boto3.resource(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    ).create_bucket(Bucket=BUCKET)
    arguments = ("--database-url", postgres_server, "--blob-url", f"s3://{BUCKET}/models")
    made = deployment(DEMO / "base", directory / "data", arguments, environment)
    yield from serve(made, lambda: sorted(item.key for item in bucket.objects.all()))
    s3.stop()


def serve(made: Deployment, blobs: Any) -> Iterator[Stand]:
    with made.running():
        keys = {}
        for tenant, adapter in ADAPTERS.items():
            assert made.json("tenants", "create", tenant)["slug"] == tenant
            keys[tenant] = made.json("keys", "create", "--tenant", tenant)["secret"]
            pushed = made.json(
                "adapters", "push", str(DEMO / "adapters" / adapter), "--tenant", tenant, "--name", adapter
            )
            assert (pushed["model"], pushed["version"]) == (f"{tenant}/{adapter}", 1)
            assert len(pushed["digest"]) == 64
        yield Stand(made, keys, blobs)


@pytest.fixture(scope="module")
def reference() -> Any:
    """The demo's base with its adapters, in peft."""
    base = AutoModelForCausalLM.from_pretrained(DEMO / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, DEMO / "adapters" / "pirate", adapter_name="pirate")
    for name in ("formal", "json"):
        model.load_adapter(DEMO / "adapters" / name, adapter_name=name)
    return model


@pytest.fixture(scope="module")
def expected(reference: Any) -> dict[tuple[str | None, str], str]:
    """The answers of transformers and peft to each demo prompt, by adapter. None stands for the base."""
    tokenizer, model = AutoTokenizer.from_pretrained(DEMO / "base", padding_side="left"), reference
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": one}], tokenize=False, add_generation_prompt=True)
        for one in PROMPTS
    ]
    inputs = tokenizer(texts, return_tensors="pt", add_special_tokens=False, padding=True)
    answers: dict[tuple[str | None, str], str] = {}
    for name in (None, *ADAPTERS.values()):
        with contextlib.ExitStack() as stack:
            if name is None:
                stack.enter_context(model.disable_adapter())
            else:
                model.set_adapter(name)
            output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
        for prompt, row in zip(PROMPTS, output[:, inputs["input_ids"].shape[1] :], strict=True):
            answers[name, prompt] = tokenizer.decode(row, skip_special_tokens=True)
    return answers


def usage(stand: Stand, tenant: str) -> tuple[int, int, int]:
    done = stand.deployment.command("usage", "--tenant", tenant, "--format", "json")
    assert done.returncode == 0, done.stderr
    results = [result for bucket in json.loads(done.stdout)["data"] for result in bucket["results"]]
    return (
        sum(one["requests"] for one in results),
        sum(one["prompt_tokens"] for one in results),
        sum(one["completion_tokens"] for one in results),
    )


def ask(stand: Stand, tenant: str, model: str, prompt: str, stream: bool) -> tuple[str, int, int]:
    """A greedy chat answer and its reported token usage."""
    client = stand.deployment.client(stand.keys[tenant])
    messages: Any = [{"role": "user", "content": prompt}]
    if not stream:
        answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=48)
        assert answer.usage is not None
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content or "", answer.usage.prompt_tokens, answer.usage.completion_tokens
    text, spent = "", None
    for chunk in client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        spent = chunk.usage or spent
    assert spent is not None
    return text, spent.prompt_tokens, spent.completion_tokens


def test_every_tenant_gets_its_own_answers_and_its_own_bill(
    stand: Stand, expected: dict[tuple[str | None, str], str]
) -> None:
    before = {tenant: usage(stand, tenant) for tenant in ADAPTERS}
    asked = [
        (tenant, name, prompt, index % 2 == 0)
        for index, prompt in enumerate(PROMPTS)
        for tenant, adapter in ADAPTERS.items()
        for name in (adapter, None)
    ]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(lambda one: ask(stand, one[0], one[1] or "demo-base", one[2], stream=one[3]), asked))
    spent = {tenant: [0, 0, 0] for tenant in ADAPTERS}
    for (tenant, name, prompt, _), (text, prompt_tokens, completion_tokens) in zip(asked, answers, strict=True):
        assert text == expected[name, prompt]
        for index, amount in enumerate((1, prompt_tokens, completion_tokens)):
            spent[tenant][index] += amount
    for tenant in ADAPTERS:
        billed = [now - then for now, then in zip(usage(stand, tenant), before[tenant], strict=True)]
        assert billed == spent[tenant]


def test_embeddings_are_the_last_hidden_states_of_transformers_and_peft(stand: Stand, reference: Any) -> None:
    tokenizer, texts = AutoTokenizer.from_pretrained(DEMO / "base"), [*PROMPTS, "A harbour " * 60]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    before = usage(stand, "harbour")
    client = stand.deployment.client(stand.keys["harbour"])
    for name, model in (("pirate", "pirate"), (None, "demo-base")):
        found = client.embeddings.create(model=model, input=texts)
        assert found.usage.prompt_tokens == sum(map(len, ids))
        assert client.embeddings.create(model=model, input=ids).data == found.data
        short = client.embeddings.create(model=model, input=texts[0], dimensions=16).data[0].embedding
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if name is None:
                stack.enter_context(reference.disable_adapter())
            else:
                reference.set_adapter(name)
            for one, tokens in zip(found.data, ids, strict=True):
                run = reference(input_ids=torch.tensor([tokens]), output_hidden_states=True)
                state = run.hidden_states[-1][0, -1]
                embedding = torch.tensor(one.embedding)
                # The served K, V and adapters are in bfloat16.
                assert embedding @ (state / state.norm()) > 0.9999
                if one.index == 0:
                    torch.testing.assert_close(torch.tensor(short), embedding[:16] / embedding[:16].norm())
    spent = [now - then for now, then in zip(usage(stand, "harbour"), before, strict=True)]
    assert spent == [6, 4 * sum(map(len, ids)) + 2 * len(ids[0]), 0]


def test_models_are_the_tenants_own(stand: Stand) -> None:
    listed = {
        tenant: {model.id for model in stand.deployment.client(key).models.list()} for tenant, key in stand.keys.items()
    }
    assert listed == {tenant: {"demo-base", f"{tenant}/{adapter}"} for tenant, adapter in ADAPTERS.items()}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "nobody/nothing"}, 404, "model_not_found"),
        ({"model": "parcels/json"}, 404, "model_not_found"),
        ({"prompt": "cow " * 5000}, 400, "context_length_exceeded"),
        ({"max_tokens": 0}, 400, None),
        ({"temperature": "warm"}, 400, None),
        ({"prompt": 7.5}, 400, None),
        (b'{"model": "pirate", "prompt": "x", "temperature": NaN}', 400, None),
        (b'{"model": "pirate", "prompt": "x"', 400, None),
        (b'{"model": "pirate", "model": "json", "prompt": "x"}', 400, None),
    ],
    ids=[
        "unknown model",
        "another tenant's model",
        "too long a prompt",
        "max_tokens 0",
        "temperature of the wrong type",
        "prompt of the wrong type",
        "temperature NaN",
        "malformed JSON",
        "duplicate key",
    ],
)
def test_a_bad_request_is_answered_and_disturbs_nobody(
    stand: Stand,
    expected: dict[tuple[str | None, str], str],
    body: dict[str, Any] | bytes,
    status: int,
    code: str | None,
) -> None:
    before = usage(stand, "harbour")
    prompt = PROMPTS[2]
    with ThreadPoolExecutor(1) as threads:
        neighbour = threads.submit(ask, stand, "chambers", "formal", prompt, True)
        content = body if isinstance(body, bytes) else json.dumps({"model": "pirate", "prompt": "x", **body}).encode()
        answer = httpx.post(
            f"http://127.0.0.1:{stand.deployment.port}/v1/completions",
            content=content,
            headers={"authorization": f"Bearer {stand.keys['harbour']}", "content-type": "application/json"},
        )
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert code is None or error["code"] == code
        assert answer.headers["x-request-id"]
        assert neighbour.result()[0] == expected["formal", prompt]
    assert usage(stand, "harbour") == before


def test_a_bad_key_opens_nothing(stand: Stand) -> None:
    with pytest.raises(openai.AuthenticationError):
        stand.deployment.client("sk-lmx-aaaaaaaaaaaaaaaa-" + "b" * 43).models.list()


def spoil(kind: str, directory: Path) -> None:
    """Copy an adapter with the damage that `kind` names."""
    config_path, tensors_path = directory / "adapter_config.json", directory / "adapter_model.safetensors"
    config = json.loads(config_path.read_text())
    match kind:
        case "truncated":
            tensors_path.write_bytes(tensors_path.read_bytes()[:-100])
        case "pickle":
            tensors_path.write_bytes(b"\x80\x04\x95" + bytes(200))
        case "rank 0":
            config["r"] = 0
        case "NaN weights":
            tensors = {
                name: np.full(value.shape, np.nan, np.float32) if "lora_B" in name else value.astype(np.float32)
                for name, value in load_file(tensors_path).items()
            }
            save_file(tensors, tensors_path)
        case "another base":
            tensors = {
                name: np.ones((value.shape[0], value.shape[1] + 8), np.float32) if "lora_A" in name else value
                for name, value in load_file(tensors_path).items()
            }
            save_file(tensors, tensors_path)
    config_path.write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["truncated", "pickle", "rank 0", "NaN weights", "another base"])
def test_an_unfit_adapter_is_rejected_and_leaves_nothing(stand: Stand, tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "adapter"
    shutil.copytree(DEMO / "adapters" / "formal", directory)
    path = directory / "adapter_model.safetensors"
    # numpy has no bfloat16, so convert the adapter to float32.
    save_tensors({name: value.float() for name, value in load_tensors(path).items()}, path)
    spoil(kind, directory)
    before = stand.blobs()
    name = kind.replace(" ", "-").lower()
    done = stand.deployment.command("adapters", "push", str(directory), "--tenant", "harbour", "--name", name, "--json")
    assert done.returncode == 1, done.stdout
    error = json.loads(done.stdout)["error"]
    assert error["code"]
    assert error["message"]
    # The rejection is reported before the blobs are deleted.
    wait_until(lambda: stand.blobs() == before)
    with pytest.raises(openai.NotFoundError):
        ask(stand, "harbour", name, PROMPTS[0], stream=False)


def test_a_quota_is_enforced_before_a_request_runs(stand: Stand) -> None:
    made = stand.deployment
    assert made.json("tenants", "create", "thrifty")["slug"] == "thrifty"
    key = made.json("keys", "create", "--tenant", "thrifty")["secret"]
    made.json("quotas", "set", "--tenant", "thrifty", "--metric", "requests_per_minute", "--limit", "2")
    client = made.client(key)
    for _ in range(2):
        client.completions.create(model="demo-base", prompt="Hello", max_tokens=1)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="demo-base", prompt="Hello", max_tokens=1)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert usage(stand, "thrifty")[0] == 2
    made.json("quotas", "set", "--tenant", "thrifty", "--metric", "tokens_per_minute", "--limit", "50")
    with pytest.raises(openai.BadRequestError, match="tokens_per_minute"):
        client.completions.create(model="demo-base", prompt="Hello", max_tokens=100)


def test_metrics_and_health_are_served(stand: Stand) -> None:
    admin = f"http://127.0.0.1:{stand.deployment.admin_port}"
    scraped, tables = exposed(httpx.get(f"{admin}/metrics").text), documented()
    # Only metrics with samples expose their labels.
    assert {name: kind for name, (kind, _) in scraped.items()} == {name: kind for name, (kind, _) in tables.items()}
    assert {name for name, (_, labels) in scraped.items() if labels and labels != tables[name][1]} == set()
    for port in (stand.deployment.port, stand.deployment.admin_port):
        for path in ("live", "ready"):
            assert httpx.get(f"http://127.0.0.1:{port}/health/{path}").status_code == 200


def test_a_dora_adapter_is_packed_with_the_servers_base(
    stand: Stand, expected: dict[tuple[str | None, str], str], tmp_path: Path
) -> None:
    """With the norms of the changed weights as magnitudes, a DoRA adapter answers like the plain adapter."""
    directory = tmp_path / "adapter"
    shutil.copytree(DEMO / "adapters" / "pirate", directory)
    config = json.loads((directory / "adapter_config.json").read_text())
    path = directory / "adapter_model.safetensors"
    tensors, base = load_tensors(path), load_tensors(DEMO / "base" / "model.safetensors")
    for name in [name for name in tensors if "lora_A" in name]:
        module = name.removesuffix(".lora_A.weight")
        a, b = tensors[name].float(), tensors[f"{module}.lora_B.weight"].float()
        weight = base[module.removeprefix("base_model.model.") + ".weight"].float()
        changed = weight + config["lora_alpha"] / config["r"] * (b @ a)
        tensors[f"{module}.lora_magnitude_vector"] = changed.norm(dim=1)
    save_tensors(tensors, path)
    (directory / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    stand.deployment.json("adapters", "push", str(directory), "--tenant", "harbour", "--name", "dora")
    for prompt in PROMPTS:
        text, _, _ = ask(stand, "harbour", "dora", prompt, stream=False)
        assert text == expected["pirate", prompt]


def test_a_classifier_is_pushed_and_only_classifies(stand: Stand, tmp_path: Path) -> None:
    torch.manual_seed(5)
    base = AutoModelForSequenceClassification.from_pretrained(
        DEMO / "base", num_labels=3, dtype=torch.float32, pad_token_id=0
    )
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS", init_lora_weights=False)
    model = get_peft_model(base, config).eval()
    model.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "adapter_config.json").read_text())
    document["id2label"] = {"0": "bad", "1": "so-so", "2": "good"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(document))
    made = stand.deployment
    checked = made.json("check", str(tmp_path), "--model", str(DEMO / "base"))
    assert checked["facts"]["task"]["labels"] == ["bad", "so-so", "good"]
    pushed = made.json("adapters", "push", str(tmp_path), "--tenant", "harbour", "--name", "mood")
    assert pushed["model"] == "harbour/mood"
    version = made.json("adapters", "show", "harbour/mood@1")
    assert version["task"] == {"kind": "classification", "labels": ["bad", "so-so", "good"], "activation": "softmax"}
    assert "classification" in made.command("adapters", "show", "harbour/mood@1").stdout
    texts = [*PROMPTS, "A harbour " * 60]
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base")
    ids = [tokenizer(text)["input_ids"] for text in texts]
    client, before = made.client(stand.keys["harbour"]), usage(stand, "harbour")
    body = {"model": "mood", "input": texts}
    headers = {"authorization": f"Bearer {stand.keys['harbour']}"}
    answer = httpx.post(f"http://127.0.0.1:{made.port}/classify", json=body, headers=headers, timeout=60).json()
    for one, tokens in zip(answer["data"], ids, strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([tokens])).logits[0].softmax(-1)
        # The served K, V and adapters are in bfloat16.
        torch.testing.assert_close(torch.tensor(one["probs"]), expected, atol=0.03, rtol=0)
        assert one["label"] == version["task"]["labels"][int(torch.tensor(one["probs"]).argmax())]
    with pytest.raises(openai.BadRequestError, match="is a classifier: call /classify"):
        client.chat.completions.create(model="mood", messages=[{"role": "user", "content": "Hello"}])
    spent = [now - then for now, then in zip(usage(stand, "harbour"), before, strict=True)]
    assert spent == [1, sum(map(len, ids)), 0]
    tasks = {one.id: (one.model_extra or {})["task"] for one in client.models.list()}
    assert tasks["harbour/mood"] == "classification"
    assert tasks["demo-base"] == tasks["harbour/pirate"] == "generation"


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_trained_head_is_compared_with_the_servers_base(
    stand: Stand, expected: dict[tuple[str | None, str], str], tmp_path: Path
) -> None:
    """A trained head that swaps two tokens gives the same answers as peft, and only its two rows take space."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base")
    prompt = PROMPTS[0]
    directory = tmp_path / "adapter"
    shutil.copytree(DEMO / "adapters" / "pirate", directory)
    config = json.loads((directory / "adapter_config.json").read_text())
    path = directory / "adapter_model.safetensors"
    tensors = load_tensors(path)
    head = load_tensors(DEMO / "base" / "model.safetensors")["model.embed_tokens.weight"]
    common, rare = tokenizer(expected["pirate", prompt], add_special_tokens=False)["input_ids"][1], 700
    head[[common, rare]] = head[[rare, common]]
    save_tensors({**tensors, "base_model.model.lm_head.weight": head}, path)
    (directory / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["lm_head"]}))
    stand.deployment.json("adapters", "push", str(directory), "--tenant", "harbour", "--name", "head")
    client = stand.deployment.client(stand.keys["harbour"])
    answer = client.chat.completions.create(
        model="head", messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=12
    )
    base = AutoModelForCausalLM.from_pretrained(DEMO / "base", dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = PeftModel.from_pretrained(base, directory).generate(**inputs, max_new_tokens=12, do_sample=False)
    wanted = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer.choices[0].message.content == wanted
    assert not expected["pirate", prompt].startswith(wanted)
    resident = stand.deployment.json("residency", "--tenant", "harbour")["data"]
    num_pages = {version["model"]: one["num_pages"] for one in resident for version in one["versions"]}
    # The whole head would take 32 more pages.
    assert num_pages["harbour/head@1"] == 8
