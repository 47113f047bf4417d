"""Adapters for sequence classification, compared with transformers and peft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend
from loramux.engine.loop.assembly import assemble_engine
from loramux.engine.loop.config import EngineConfig, pack_target
from loramux.engine.protocol.messages import Add, Finished, SamplingParams, StepOutput
from tests.conformance.test_pooled_prompts import CASES, STEP_TOKENS
from tests.conformance.tiny_models import (
    ALL_LINEARS,
    SMALL_SHAPE,
    SMALL_WINDOW,
    VOCAB_SIZE,
    make_base,
    pack_peft_directory,
)
from tests.engine.device.gpu_backend import gpu_backend, plain_backend

TOLERANCE = 1e-5
"""Largest difference of logits, as a part of the largest logit of the adapter."""


@dataclass(frozen=True)
class Classifier:
    model: Any
    packed: PackedAdapter
    num_labels: int


@dataclass(frozen=True)
class Classifiers:
    directory: Path
    adapters: dict[str, Classifier]
    generating: PackedAdapter


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Classifiers:
    directory = tmp_path_factory.mktemp(request.param)
    base = make_base(request.param, directory / "base", SMALL_SHAPE, SMALL_WINDOW)
    target = pack_target(ModelConfig.load(directory / "base"), "float32")
    made = {}
    plans: list[tuple[str, int, dict[str, Any]]] = [
        ("one", 1, {"r": 1, "target_modules": ["v_proj"]}),
        ("three", 3, {"r": 8, "target_modules": ALL_LINEARS, "use_dora": True}),
        ("many", 77, {"r": 64, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]}),
    ]
    for seed, (name, num_labels, settings) in enumerate(plans):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(
            directory / "base", num_labels=num_labels, pad_token_id=0, attn_implementation="eager"
        )
        wrapped = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, **settings)).eval()
        wrapped.save_pretrained(directory / name)
        made[name] = Classifier(wrapped, pack_peft_directory(directory / name, target, directory / "base"), num_labels)
    config = LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(base, config).save_pretrained(directory / "generating")
    packed = pack_peft_directory(directory / "generating", target, directory / "base")
    return Classifiers(directory / "base", made, packed)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend | None:
    match request.param:
        case "cpu":
            return None
        case "gpu":
            return gpu_backend(monkeypatch)
    return plain_backend(HostAccelerator())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("subject", "backend", "steps"), CASES, indirect=["subject", "backend"])
def test_logits_of_classes_equal_transformers_and_peft_beside_generation(
    subject: Classifiers, backend: Backend | None, steps: str
) -> None:
    packed = {one.digest: one for one in (subject.generating, *(one.packed for one in subject.adapters.values()))}
    config = EngineConfig(
        model_dir=str(subject.directory),
        blob_url="",
        cache_dir="",
        dtype="float32",
        pool_bytes=96 << 20,
        max_batch_tokens=STEP_TOKENS[steps],
        max_sequences=16,
        num_threads=1,
    )
    assembled = assemble_engine(config, lambda: None, MemoryStager(packed), backend=backend)
    generator = torch.Generator().manual_seed(7)
    asked: list[tuple[str, Add]] = []
    for length in (1, 5, 40, 90):
        prompt = tuple(torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist())
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        for name, one in subject.adapters.items():
            add = Add(
                sequence_id=f"{name} {length}",
                prompt=prompt,
                max_tokens=0,
                sampling=sampling,
                digest=one.packed.digest,
                pooling="last",
                num_labels=one.num_labels,
            )
            asked.append((name, add))
        for digest in (None, subject.generating.digest):
            plain = Add(sequence_id=f"{digest} {length}", prompt=prompt, max_tokens=4, sampling=sampling, digest=digest)
            assembled.engine.add(b"", plain)
    for _, add in asked:
        assembled.engine.add(b"", add)
    found: dict[str, torch.Tensor] = {}
    while assembled.engine.has_work:
        assembled.engine.step()
        for outbound in assembled.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        if output.pooled:
                            values = np.frombuffer(output.pooled, "<f4").copy()
                            found[output.sequence_id] = torch.from_numpy(values)
                case Finished() as end:
                    assert end.reason in ("stop", "length"), end
    assembled.engine.check_integrity()
    assembled.adapters.close()
    for name, add in asked:
        with torch.no_grad():
            expected = subject.adapters[name].model(input_ids=torch.tensor([add.prompt])).logits[0]
        limit = TOLERANCE * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found[add.sequence_id], expected, atol=limit, rtol=0)
