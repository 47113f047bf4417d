"""Adapters with trained biases and norms give the same logits as peft."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.backend import Backend
from loramux.engine.execution.direct_executor import DirectExecutor
from loramux.engine.execution.graph_executor import GraphExecutor
from loramux.engine.loop.config import pack_target
from loramux.engine.protocol.messages import StatsRequest
from loramux.engine.sequences.layer_groups import LayerGroups
from tests.conformance.parity import Recorder, run
from tests.conformance.test_gpu_engine import PATHS, gpu_path
from tests.conformance.test_trained_rows import TrainedSubject, check, requests_of
from tests.conformance.tiny_models import SMALL_SHAPE, SMALL_WINDOW, make_base, pack_peft_directory

# peft warns about tied weights, biases and merging, which this test never does.
pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS: dict[str, dict[str, Any]] = {
    "biases": {"bias": "all"},
    "own-biases": {"bias": "lora_only"},
    "dora-and-biases": {"bias": "all", "use_dora": True},
    "lora-bias-and-biases": {"bias": "all", "lora_bias": True},
    "norms": {"modules_to_save": ["norm"]},
    "final-norm": {"modules_to_save": ["model.norm"]},
    "dora-and-norms": {"modules_to_save": ["layernorm"], "use_dora": True},
    "head-norms-and-biases": {"modules_to_save": ["lm_head", "layers.1.input_layernorm"], "bias": "all"},
    "plain": {},
}
"""Settings of adapters that also have a LoRA of two modules."""

FURTHER = ("gemma2", "qwen3", "qwen3_5", "gpt-oss", "phi", "cohere", "olmo2", "stablelm", "qwen3-moe", "gemma3")
FAMILIES = ["starcoder2", "qwen2", *(pytest.param(family, marks=pytest.mark.campaign) for family in FURTHER)]
"""Starcoder 2 has biases in all linear layers and in its norms, Qwen 2 only in q, k and v."""


def can_be_made(base: Any, settings: dict[str, Any]) -> bool:
    """Return whether peft finds a module for each name, and a bias to train."""
    names = [name for name, _ in base.named_modules()]
    saved = settings.get("modules_to_save", [])
    has_biases = any(name.endswith(".bias") for name, _ in base.named_parameters())
    return all(any(name.endswith(one) for name in names) for one in saved) and (has_biases or "bias" not in settings)


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainedSubject:
    directory, family = tmp_path_factory.mktemp(request.param), request.param
    base = make_base(family, directory / "base", SMALL_SHAPE, SMALL_WINDOW)
    target = pack_target(ModelConfig.load(directory / "base"), "float32")
    made = TrainedSubject(directory / "base", None, {}, {}, {}, base, {}, base.config.tie_word_embeddings)
    for index, (name, settings) in enumerate(SETTINGS.items()):
        if not can_be_made(base, settings):
            continue
        torch.manual_seed(index)
        config = LoraConfig(
            r=3, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM",
            target_modules=["q_proj", "v_proj"], **settings,
        )  # fmt: skip
        model = get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * (0.08 if "lora_" in parameter_name else 0.3))
        model.save_pretrained(directory / name, save_embedding_layers=False)
        packed = pack_peft_directory(directory / name, target, directory / "base")
        made.saved[name], made.digests[name] = directory / name, packed.digest
        made.adapters[packed.digest], made.num_pages[name] = packed, packed.num_pages
    return made


def test_each_adapter_alone_and_all_in_one_batch_equal_peft(
    subject: TrainedSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = subject.assemble(max_sequences=32, max_batch_tokens=128)
    recorder = Recorder(assembled.engine, monkeypatch)
    for name in subject.saved:
        check(subject, assembled, recorder, [name])
    check(subject, assembled, recorder, [None, *subject.saved, None])
    stats = assembled.engine.stats(StatsRequest(call_id=""))
    assert stats.max_adapters_in_step == len(subject.saved)
    assert stats.num_adapter_pages == sum(subject.num_pages.values())
    assembled.engine.check_integrity()
    assembled.adapters.close()


def test_rows_of_other_requests_keep_their_bits(subject: TrainedSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    assembled = subject.assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    names = [name for name in subject.saved if name != "plain"]
    check(subject, assembled, recorder, [None, names[0], "plain", names[-1], "norms" if "norms" in names else None])
    executor = recorder.executor
    assert isinstance(executor, DirectExecutor)
    num_equal = num_changed = 0
    for batch, logits in recorder.steps:
        expected = executor.logits(msgspec.structs.replace(batch, slots=np.full_like(batch.slots, -1)))
        for row, sample_row in enumerate(batch.sample_rows.tolist()):
            if batch.slots[sample_row] < 0:
                assert torch.equal(logits[row], expected[row])
                num_equal += 1
            else:
                num_changed += not torch.equal(logits[row], expected[row])
    assert num_equal >= 4
    assert num_changed >= 12
    assembled.adapters.close()


def test_a_batch_without_such_adapters_launches_nothing_for_them(
    subject: TrainedSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = subject.assemble()
    executor = assembled.engine._executor
    assert isinstance(executor, DirectExecutor)
    launched: list[str] = []
    monkeypatch.setattr(type(executor._kernels), "lora_affine", lambda *_: launched.append("affine"))
    for _, add in requests_of(subject, [None, "plain"]).values():
        assembled.engine.add(b"", add)
    run(assembled.engine)
    assert not launched
    if "norms" in subject.saved:
        for _, add in requests_of(subject, ["norms"]).values():
            assembled.engine.add(b"", add)
        run(assembled.engine)
        assert launched
    assembled.adapters.close()


@pytest.fixture(params=PATHS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    return gpu_path(request.param, monkeypatch)


@pytest.mark.parametrize(
    "subject",
    [pytest.param(one, marks=() if one == "starcoder2" else pytest.mark.campaign) for one in ("starcoder2", "qwen3")],
    indirect=True,
)
def test_the_gpu_path_equals_peft(subject: TrainedSubject, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    assembled = subject.assemble(backend, max_batch_tokens=32, max_sequences=8)
    recorder = Recorder(assembled.engine, monkeypatch)
    names = [name for name in ("biases", "norms", "plain") if name in subject.saved]
    check(subject, assembled, recorder, [None, *names])
    executor = recorder.executor
    assert isinstance(executor, GraphExecutor)
    assert any(LayerGroups.NORMS in shape.groups for shape in executor._graphs)
    check(subject, assembled, recorder, [None, "plain"])
    assert any(LayerGroups.NORMS not in shape.groups and shape.max_rank for shape in executor._graphs)
    assembled.engine.check_integrity()
    assembled.adapters.close()
