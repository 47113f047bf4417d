"""Adapters that peft trained on a whole multimodal model, with that model's names, give the same logits for text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from loramux.adapter_store.formats.files.ignored_tensors import is_ignored
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import pack_target
from loramux.engine.protocol.messages import Add, SamplingParams
from tests.conformance.parity import Recorder, assert_parity, run
from tests.conformance.test_trained_rows import TrainedSubject
from tests.conformance.tiny_models import SMALL_SHAPE, SMALL_WINDOW, VOCAB_SIZE, make_base, pack_peft_directory

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = [3, 160, VOCAB_SIZE - 1]
FAMILIES = [
    "qwen2_5_vl",
    *(
        pytest.param(name, marks=pytest.mark.campaign)
        for name in ("gemma3-multimodal", "mistral3", "qwen3_vl", "llava", "idefics3")
    ),
]


def forms(base: Any) -> dict[str, dict[str, Any]]:
    """Settings with the names that a user reads from `named_modules`."""
    part = "text_model" if any("text_model.layers" in name for name, _ in base.named_modules()) else "language_model"
    linears = [name for name, _ in base.named_modules() if f"{part}.layers" in name]
    projections = [name for name in linears if name.endswith((".q_proj", ".down_proj"))]
    [embedding] = [name for name, _ in base.named_modules() if name.endswith(f"{part}.embed_tokens")]
    ranks = {"rank_pattern": {projections[0]: 5}, "alpha_pattern": {projections[1]: 11}}
    return {
        "full-names": {"target_modules": projections, **ranks},
        "ends-of-names": {"target_modules": [name.partition("model.")[2] for name in projections]},
        "excluded": {"target_modules": projections[:4], "exclude_modules": projections[1:2]},
        "saved-head": {"target_modules": projections, "modules_to_save": ["lm_head"]},
        "saved-embedding": {"target_modules": projections, "modules_to_save": [embedding]},
        "tokens": {"target_modules": projections, "trainable_token_indices": {embedding: TOKENS}},
        "regex": {"target_modules": rf".*{part}\.layers\.[0-9]+\.self_attn\.(q|v)_proj"},
        "pattern": {"target_modules": ["q_proj"], "alpha_pattern": {rf"^model\..*{part}\.layers\.1\..*q_proj$": 11}},
        # These also change the other parts of the model, which do not matter for text.
        "every-linear": {"target_modules": "all-linear"},
        "every-part": {"target_modules": r".*(vis|connect|project|layers\.1\.).*(q_proj|qkv|proj|fc1|fc2|linear_1)"},
        "saved-projector": {"target_modules": projections, "modules_to_save": [_projector(base)]},
    }


def _projector(base: Any) -> str:
    """The module between the vision tower and the text decoder."""
    ends = ("visual.merger", "multi_modal_projector", "connector")
    [name] = [name for name, _ in base.named_modules() if name.endswith(ends) and ".layers." not in name]
    return str(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_the_whole_model_are_accepted(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_base(family, tmp_path / "base", SMALL_SHAPE, SMALL_WINDOW)
    target = pack_target(ModelConfig.load(tmp_path / "base"), "float32")
    tied = bool(getattr(base.config, "tie_word_embeddings", False))
    subject = TrainedSubject(tmp_path / "base", None, {}, {}, {}, base, {}, tied)
    for seed, (name, settings) in enumerate(forms(base).items()):
        torch.manual_seed(seed)
        config = LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
        model = get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.05 if "lora_" in parameter_name else 0.3)
        model.save_pretrained(tmp_path / name, save_embedding_layers=False)
        if name in ("every-linear", "every-part", "saved-projector"):
            assert any(map(is_ignored, load_file(tmp_path / name / "adapter_model.safetensors")))
        packed = pack_peft_directory(tmp_path / name, target, tmp_path / "base")
        subject.saved[name], subject.digests[name] = tmp_path / name, packed.digest
        subject.adapters[packed.digest], subject.num_pages[name] = packed, packed.num_pages
    assembled = subject.assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    asked = {
        name: Add(
            sequence_id=name,
            prompt=(5, *TOKENS, 9),
            max_tokens=3,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            digest=digest,
        )
        for name, digest in subject.digests.items()
    }
    for add in asked.values():
        assembled.engine.add(b"", add)
    run(assembled.engine)
    for name, add in asked.items():
        assert_parity(subject, name, add, recorder.by_sequence[name])
    assembled.adapters.close()
