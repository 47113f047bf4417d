"""Trainers push weights from memory, with and without torch."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from transformers import LlamaConfig, LlamaForCausalLM

from loramux.admin.client import weights_push
from loramux.admin.client.client import AdminClient, AdminError, ServerUnreachable
from loramux.admin.client.push import PushRefused, push_adapter
from loramux.admin.client.weights_push import AsyncWeightsPush, WeightsPush
from tests.admin.admin_side import ADMIN_KEY
from tests.docs.write import DOCS
from tests.ports import free_port

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture
def client(admin_url: str) -> Iterator[AdminClient]:
    with AdminClient(admin_url, ADMIN_KEY) as client:
        client.post("tenants", {"slug": "acme"})
        yield client


def exported(client: AdminClient, number: int) -> bytes:
    adapter_id = client.get("adapters", tenant="acme")["data"][0]["id"]
    with client.stream(f"adapters/{adapter_id}/versions/{number}/files/adapter_model.safetensors") as chunks:
        return b"".join(chunks)


def test_arrays_tensors_and_directories_become_versions(
    client: AdminClient, admin_url: str, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    directories = [make_adapter() for _ in range(3)]
    paths = [directory / "adapter_model.safetensors" for directory in directories]
    with WeightsPush(admin_url, ADMIN_KEY, "acme/policy") as policy:
        first = policy.push(load_file(paths[0]), CONFIG)
        peft_config = LoraConfig(r=2, lora_alpha=4, target_modules={"q_proj", "down_proj"})
        rounded = {
            # Neither contiguous, nor float32, nor detached.
            name: torch.nn.Parameter(weight.T.contiguous().to(torch.bfloat16).T)
            for name, weight in load_tensors(paths[1]).items()
        }
        second = policy.push(rounded, peft_config, alias="default", wait="resident")
        third = policy.push(directories[2])
    assert [(one.model, one.version) for one in (first, second, third)] == [
        (f"acme/policy@{number}", number) for number in (1, 2, 3)
    ]
    file = tmp_path / "exported.safetensors"
    file.write_bytes(exported(client, 1))
    sent = load_file(paths[0])
    assert {name: array.tobytes() for name, array in load_file(file).items()} == {
        name: array.tobytes() for name, array in sent.items()
    }
    file.write_bytes(exported(client, 2))
    found = load_tensors(file)
    assert found.keys() == rounded.keys()
    assert all(torch.equal(found[name], rounded[name]) for name in rounded)
    assert exported(client, 3) == paths[2].read_bytes()
    assert client.get("adapters", tenant="acme")["data"][0]["aliases"] == {"default": [{"version": 2, "weight": 100}]}


def test_pushes_at_a_time_end_with_the_last_version(
    client: AdminClient, admin_url: str, make_adapter: Callable[..., Path]
) -> None:
    async def push_all() -> list[int]:
        async with AsyncWeightsPush(admin_url, ADMIN_KEY, "acme/policy") as policy:
            await policy.push(make_adapter())
            pushes = [policy.push(make_adapter(), alias="default") for _ in range(6)]
            return sorted(pushed.version for pushed in await asyncio.gather(*pushes))

    assert asyncio.run(push_all()) == [2, 3, 4, 5, 6, 7]
    assert client.get("adapters", tenant="acme")["data"][0]["aliases"] == {"default": [{"version": 7, "weight": 100}]}


def test_a_busy_server_gets_the_push_again(
    client: AdminClient, admin_url: str, make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, pauses = make_adapter(), list[float]()
    # Other threads of this process may sleep, too.
    monkeypatch.setattr(weights_push, "time", SimpleNamespace(sleep=pauses.append))
    with WeightsPush(admin_url, ADMIN_KEY, "acme/policy") as policy:
        request, refused = policy._http.request, []

        def busy(**call: Any) -> Any:
            if call["method"] == "PUT" and len(refused) < 2:
                refused.append(call)
                return httpx.Response(
                    429, json={"error": {"message": "busy", "code": "too_many_pushes"}}, headers={"retry-after": "60"}
                )
            return request(**call)

        monkeypatch.setattr(policy._http, "request", busy)
        assert policy.push(directory).version == 1
    assert pauses == [weights_push.MAX_PAUSE_S] * 2


def test_a_push_is_sent_in_small_chunks_as_often_as_needed() -> None:
    """httpcore copies the rest of a chunk after each call to the socket, which may take a small part of it."""
    files = weights_push._memory_files({"a": np.zeros(1 << 20, np.float32)}, CONFIG)
    request = httpx.Request("PUT", "http://host/", files=files)
    assert isinstance(request.stream, httpx.SyncByteStream)
    chunks, again = list(request.stream), list(request.stream)
    assert max(map(len, chunks)) <= 1 << 20
    assert sum(map(len, chunks)) == int(request.headers["content-length"]) > 4 << 20
    assert chunks == again


def test_a_directory_becomes_the_version_that_the_command_makes(
    client: AdminClient, admin_url: str, make_adapter: Callable[..., Path]
) -> None:
    directory = make_adapter()
    modules = [{"type": f"models.{name}", "path": "1_Pooling"} for name in ("Transformer", "Pooling")]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|user|>", "chat_template": "{{ messages }}"}')
    tensors = directory / "adapter_model.safetensors"
    by_command = push_adapter(client, directory, "acme", "command")
    # The shards of the tensors are joined, too.
    tensors.rename(directory / "adapter_model-00001-of-00001.safetensors")
    with WeightsPush(admin_url, ADMIN_KEY, "acme/program") as policy:
        by_program = policy.push(directory)
        with pytest.raises(ValueError, match="a directory has its own configuration"):
            policy.push(directory, CONFIG)
    assert by_program.version_digest == by_command.version_digest


def test_a_directory_is_pushed_without_files_that_the_push_would_refuse(
    client: AdminClient, admin_url: str, make_adapter: Callable[..., Path]
) -> None:
    directory = make_adapter()
    with WeightsPush(admin_url, ADMIN_KEY, "acme/policy") as policy:
        plain = policy.push(directory)
        (directory / "modules.json").write_text('[{"type": "models.Dense", "path": "1_Dense"}]')
        (directory / "chat_template.jinja").write_text("{{ messages }}")
        with pytest.raises(PushRefused, match="only Transformer, Pooling and Normalize"):
            policy.push(directory)
        pushed = policy.push(directory, without=("chat_template.jinja", "pooling.json"))
    assert pushed.version_digest == plain.version_digest


def test_tied_weights_are_sent_twice(tmp_path: Path) -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    (tmp_path / "file").write_bytes(weights_push._tensor_bytes({"head": tied, "embedding": tied, "row": tied[1]}))
    found = load_tensors(tmp_path / "file")
    assert torch.equal(found["head"], found["embedding"])
    assert torch.equal(found["row"], tied[1])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (httpx.ReadTimeout("timed out"), "the loramux server at llm.example took too long to answer: push again"),
        (httpx.ConnectTimeout("timed out"), r"no loramux server answers at llm.example \(timed out\)"),
    ],
)
def test_a_slow_server_is_not_taken_for_an_absent_one(error: httpx.TransportError, message: str) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    with WeightsPush("https://llm.example", ADMIN_KEY, "acme/policy") as policy:
        policy._http = httpx.Client(base_url=policy._http.base_url, transport=httpx.MockTransport(fail))
        with pytest.raises(ServerUnreachable, match=message):
            policy.push({"a": np.zeros((2, 2), np.float32)}, CONFIG)


@pytest.mark.parametrize(
    ("weights", "config"),
    [
        pytest.param({"a": np.zeros((2, 2), np.float32)}, None, id="no configuration"),
        pytest.param({"a": np.zeros((2, 2), np.float32)}, "r: 2", id="configuration of another kind"),
        pytest.param({"a": np.zeros((2, 2), np.float32)}, {"r": object()}, id="configuration without JSON"),
        pytest.param({"a": np.zeros((2, 2), np.complex256)}, CONFIG, id="dtype that no file has"),
        pytest.param({"a": "weights"}, CONFIG, id="no array"),
        pytest.param({"a": torch.zeros(2), "b": np.zeros(2)}, CONFIG, id="tensors and arrays"),
    ],
)
def test_weights_that_cannot_be_sent_are_refused_here(admin_url: str, weights: Any, config: Any) -> None:
    with WeightsPush(admin_url, ADMIN_KEY, "acme/policy") as policy, pytest.raises(ValueError, match=r"weights|config"):
        policy.push(weights, config)


def test_refusals_and_missing_servers_are_errors_of_the_client(
    client: AdminClient, admin_url: str, make_adapter: Callable[..., Path]
) -> None:
    with WeightsPush(admin_url, ADMIN_KEY, "acme/policy") as policy:
        with pytest.raises(AdminError) as refused:
            policy.push(make_adapter(poison=float("nan")))
        assert (refused.value.status, refused.value.code) == (400, "not_finite")
    with WeightsPush(admin_url, ADMIN_KEY, "globex/policy") as policy, pytest.raises(AdminError, match="no tenant"):
        policy.push(make_adapter())
    with (
        WeightsPush(f"http://127.0.0.1:{free_port()}", ADMIN_KEY, "acme/policy") as policy,
        pytest.raises(ServerUnreachable),
    ):
        policy.push(make_adapter())
    for name in ("policy", "/policy", "acme/", "acme/policy/1"):
        with pytest.raises(ValueError, match="TENANT/NAME"):
            WeightsPush(admin_url, ADMIN_KEY, name)


def test_the_module_does_not_import_torch() -> None:
    code = "import sys, loramux.admin.client.weights_push; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_example_in_the_documentation_pushes_each_step(
    client: AdminClient, admin_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    model = get_peft_model(LlamaForCausalLM(base), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))

    def train(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0.0, 0.02)

    text = (DOCS / "runtime-adapters.md").read_text()
    (example,) = re.findall(r"```python\n(from peft.*?)```", text, re.DOTALL)
    code = example.replace("http://127.0.0.1:8001", admin_url)
    exec(code, {"key": ADMIN_KEY, "num_steps": 2, "train": train, "model": model})
    assert capsys.readouterr().out == "step 0 is acme/policy@1\nstep 1 is acme/policy@2\n"
    assert client.get("adapters", tenant="acme")["data"][0]["aliases"] == {"default": [{"version": 2, "weight": 100}]}
