"""Before the position from which an adapter applies, everything is the base's, whatever the adapter has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import EngineConfig, pack_target
from loramux.engine.offline.local_adapter import read_adapter
from loramux.engine.quantizing.quality import log_probabilities
from tests.demo_base import DEMO_BASE

NUM_TOKENS, START = 48, 17


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "features",
    [
        {"use_dora": True, "modules_to_save": ["embed_tokens", "lm_head"]},
        {"lora_bias": True, "modules_to_save": ["norm", "input_layernorm"]},
    ],
    ids=["DoRA, embedding and head", "biases and norms"],
)
def test_the_prefix_is_the_bases(tmp_path: Path, features: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    reference: Any = AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    modules = ["q_proj", "v_proj", "down_proj"]
    adapted = get_peft_model(reference, LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM", **features))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(tmp_path)
    config = EngineConfig(model_dir=str(DEMO_BASE), blob_url="", cache_dir="", dtype="float32", num_threads=1)
    target = pack_target(ModelConfig.load(DEMO_BASE), "float32")
    adapter = read_adapter(tmp_path, target, BaseWeights(DEMO_BASE), None, {}).packed
    text = tuple(torch.randint(10, 1000, (NUM_TOKENS,), generator=generator).tolist())
    base, whole, shared = (
        log_probabilities(config, text),
        log_probabilities(config, text, adapter),
        log_probabilities(config, text, adapter, activation=START),
    )
    assert torch.equal(shared[:START], base[:START])
    for other in (base, whole):
        assert (shared[START:] - other[START:]).abs().amax(1).min() > 0.1
