"""A PEFT directory with a tokenizer that has added tokens, from the push to the answers of a running server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conformance.served import Deployment, deployment
from tests.demo_base import DEMO_BASE

pytestmark = [pytest.mark.campaign, pytest.mark.filterwarnings("ignore")]

WORDS, SPECIAL = ["[harbour]", "gull feather"], ["<|check|>"]
PROMPTS = ("Ask the [harbour]master", "a gull feather<|check|> falls", "plain words")


def train(directory: Path, seed: int, prefix: str = "") -> tuple[Any, Any]:
    """Save an adapter of a resized model with random weights, and the tokenizer that it belongs to."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_BASE)
    tokenizer.add_tokens([prefix + word for word in WORDS])
    tokenizer.add_special_tokens({"additional_special_tokens": [prefix + word for word in SPECIAL]})
    base = AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    base.resize_token_embeddings(len(tokenizer))
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.05 if "lora_" in name else 0.5)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # The version would otherwise have a template of its own.
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    fresh = AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    fresh.resize_token_embeddings(len(tokenizer))
    return PeftModel.from_pretrained(fresh, directory).eval(), tokenizer


def complete(stand: Deployment, key: str, model: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"http://127.0.0.1:{stand.port}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def test_pushed_tokens_are_prompted_and_generated(tmp_path: Path) -> None:
    adapters = {tenant: train(tmp_path / tenant, seed, f"{tenant}:") for seed, tenant in enumerate(("acme", "bravo"))}
    stand = deployment(DEMO_BASE, tmp_path / "data", ("--dtype", "float32"), {})
    keys: dict[str, str] = {}
    with stand.running(tmp_path / "log"):
        for tenant in adapters:
            checked = stand.json("check", str(tmp_path / tenant), "--model", str(DEMO_BASE), "--dtype", "float32")
            assert len(checked["facts"]["added_vocabulary"]["tokens"]) == 3
            stand.json("tenants", "create", tenant)
            keys[tenant] = stand.json("keys", "create", "--tenant", tenant)["secret"]
            stand.json("adapters", "push", str(tmp_path / tenant), "--tenant", tenant, "--name", "support")
        shown = stand.command("adapters", "show", "acme/support@1").stdout
        assert '1024="acme:[harbour]"' in shown
        for tenant, (model, tokenizer) in adapters.items():
            first, last = len(tokenizer) - 3, len(tokenizer) - 1
            for prompt in PROMPTS:
                prompt = (
                    prompt.replace("[", f"{tenant}:[").replace("gull", f"{tenant}:gull").replace("<|", f"{tenant}:<|")
                )
                inputs = tokenizer(prompt, return_tensors="pt")
                expected = model.generate(**inputs, max_new_tokens=16, min_new_tokens=16, do_sample=False)[0].tolist()
                num_prompt = inputs["input_ids"].shape[1]
                found = complete(stand, keys[tenant], "support", prompt, return_token_ids=True)
                assert found["prompt_token_ids"] == expected[:num_prompt]
                assert found["token_ids"] == expected[num_prompt:]
                assert (
                    found["text"]
                    == tokenizer.decode(expected, skip_special_tokens=True)[
                        len(tokenizer.decode(expected[:num_prompt], skip_special_tokens=True)) :
                    ]
                )
            # Each tenant's biased answer is its own word for the same id.
            biased = complete(stand, keys[tenant], "support", "x", logit_bias={str(first): 100}, max_tokens=2)
            assert biased["text"] == f"{tenant}:[harbour]" * 2
            ended = complete(stand, keys[tenant], "support", "x", logit_bias={str(last): 100}, stop_token_ids=[last])
            assert (ended["finish_reason"], ended["text"]) == ("stop", "")
        without = tmp_path / "without"
        shutil.copytree(tmp_path / "acme", without)
        (without / "tokenizer.json").unlink()
        (without / "tokenizer_config.json").unlink()
        refused = stand.command("adapters", "push", str(without), "--tenant", "acme", "--name", "other")
        assert refused.returncode != 0
        assert "vocabulary_missing" in refused.stderr
