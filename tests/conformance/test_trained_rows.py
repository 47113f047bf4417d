"""Adapters with a trained head or embedding, whole or in part, give the same logits as peft."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from loramux.adapter_store.errors import AdapterRejected
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend
from loramux.engine.execution.direct_executor import DirectExecutor
from loramux.engine.execution.graph_executor import GraphExecutor
from loramux.engine.loop.config import pack_target
from loramux.engine.protocol.messages import Add, SamplingParams, StatsRequest
from tests.conformance.parity import TOLERANCE, Recorder, Subject, assert_parity, run
from tests.conformance.test_gpu_engine import PATHS, gpu_path
from tests.conformance.test_prompt_logprobs import run as run_scoring
from tests.conformance.tiny_models import (
    ATTENTION,
    RENAMED_MODULES,
    SMALL_SHAPE,
    SMALL_WINDOW,
    VOCAB_SIZE,
    make_base,
    pack_peft_directory,
)
from tests.engine.device.gpu_backend import plain_backend

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:.*ensure_weight_tying"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings("ignore:Adapter .default.. . LoRA tensor.s. have invalid shape"),
]

TOKENS = [317, 5, 0, 44, 160, 7, VOCAB_SIZE - 1]
"""Trained tokens, which PEFT does not require to be sorted."""
SOME = {"target_modules": ["q_proj", "down_proj"]}
EMBEDDING_AND_HEAD = ["embed_tokens", "lm_head"]

SETTINGS: dict[str, dict[str, Any]] = {
    "head": {**SOME, "modules_to_save": ["lm_head"]},
    "embedding": {**SOME, "modules_to_save": ["embed_tokens"]},
    "both": {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "model.embed_tokens"]},
    "both-tied": {**SOME, "modules_to_save": EMBEDDING_AND_HEAD, "ensure_weight_tying": True},
    "tokens": {**SOME, "trainable_token_indices": TOKENS},
    "one-token": {**SOME, "trainable_token_indices": {"embed_tokens": [TOKENS[0]]}},
    "head-tokens": {**SOME, "trainable_token_indices": {"lm_head": TOKENS[:3]}},
    "other-tokens": {**SOME, "trainable_token_indices": {"lm_head": TOKENS[2:], "embed_tokens": TOKENS[:4]}},
    "same-tokens": {**SOME, "trainable_token_indices": {"lm_head": TOKENS, "model.embed_tokens": TOKENS}},
    "all-tokens": {**SOME, "trainable_token_indices": list(range(VOCAB_SIZE))},
    "head-and-tokens": {
        **SOME,
        "modules_to_save": ["embed_tokens"],
        "trainable_token_indices": {"lm_head": TOKENS},
    },
    "lora-of-head-and-tokens": {
        "target_modules": ["q_proj", "lm_head"],
        "trainable_token_indices": TOKENS,
    },
    "lora-of-head-and-embedding": {"target_modules": ["v_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
    "tied-lora": {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
    "tied-dora": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True, "use_dora": True},
    "lora-and-copies": {"target_modules": ["q_proj", "lm_head"]},
    "dora-and-copies": {"target_modules": ["v_proj", "lm_head", "embed_tokens"], "use_dora": True},
    "dora-of-head-and-tokens": {
        "target_modules": ["q_proj", "lm_head"],
        "trainable_token_indices": TOKENS,
        "use_dora": True,
    },
    "bias-of-head-and-tokens": {
        "target_modules": ["q_proj", "lm_head"],
        "trainable_token_indices": TOKENS,
        "lora_bias": True,
    },
    "plain": SOME,
}
"""Settings of adapters, which also have a LoRA of some modules."""

COPIED = {"lora-of-head-and-embedding", "head", "lora-and-copies", "dora-and-copies"}
"""Adapters saved with a copy of the base's weights, as PEFT does by default for a LoRA of the head or embedding."""

UNTIED_ONLY = {"dora-of-head-and-tokens"}
"""Adapters that PEFT cannot run if the base ties its head to its embedding."""

CHANGED = {"lora-and-copies", "dora-and-copies"}
"""Adapters with copies of the base's weights that are changed in the rows of TOKENS."""

UNTIED, TIED = "llama", "qwen2"
FAMILIES = [
    UNTIED,
    TIED,
    pytest.param("gemma2", marks=pytest.mark.campaign),
    pytest.param("phi3-window", marks=pytest.mark.campaign),
]


@dataclass(frozen=True)
class TrainedSubject(Subject):
    """A subject with a reference that loads each adapter into a copy of the base, because PEFT may overwrite the
    weights.
    """

    base: Any
    saved: dict[str, Path]
    is_tied: bool

    def reference_logits(self, name: str | None, tokens: list[int], num_prompt: int | None = None) -> torch.Tensor:
        base = copy.deepcopy(self.base)
        model = base if name is None else PeftModel.from_pretrained(base, self.saved[name]).eval()
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
            return logits


@pytest.fixture(params=PATHS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    return gpu_path(request.param, monkeypatch)


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainedSubject:
    directory, family = tmp_path_factory.mktemp(request.param), request.param
    base = make_base(family, directory / "base", SMALL_SHAPE, SMALL_WINDOW)
    target = pack_target(ModelConfig.load(directory / "base"), "float32")
    made = TrainedSubject(directory / "base", None, {}, {}, {}, base, {}, base.config.tie_word_embeddings)
    for index, (name, settings) in enumerate(SETTINGS.items()):
        if family.startswith("phi3"):
            names = {RENAMED_MODULES["phi3"].get(module, module) for module in settings["target_modules"]}
            settings = {**settings, "target_modules": sorted(names)}
        torch.manual_seed(index)
        config = LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
        model = get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.08 if "lora_" in parameter_name else 0.3)
        model.save_pretrained(directory / name, save_embedding_layers=name in COPIED)
        if name in UNTIED_ONLY and made.is_tied:
            with pytest.raises(AdapterRejected, match="PEFT cannot combine"):
                pack_peft_directory(directory / name, target, directory / "base")
            continue
        if name in CHANGED:
            change_copies(directory / name / "adapter_model.safetensors")
        packed = pack_peft_directory(directory / name, target, directory / "base")
        made.saved[name], made.digests[name] = directory / name, packed.digest
        made.adapters[packed.digest], made.num_pages[name] = packed, packed.num_pages
    return made


def change_copies(path: Path) -> None:
    tensors = load_file(path)
    copies = [name for name in tensors if name.endswith("base_layer.weight")]
    assert copies
    for name in copies:
        tensors[name] = tensors[name].clone()
        tensors[name][TOKENS] += torch.randn(len(TOKENS), 1, generator=torch.Generator().manual_seed(1))
    save_file(tensors, path, {"format": "pt"})


def requests_of(subject: Subject, names: list[str | None]) -> dict[str, tuple[str | None, Add]]:
    """One request per name. The prompts contain trained and other tokens."""
    generator = torch.Generator().manual_seed(5)
    made: dict[str, tuple[str | None, Add]] = {}
    for index, name in enumerate(names):
        prompt = torch.randint(VOCAB_SIZE, (3 + 5 * (index % 4),), generator=generator).tolist() + TOKENS[: index % 8]
        add = Add(
            sequence_id=f"{index}-{name}",
            prompt=tuple(prompt),
            max_tokens=4,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            digest=None if name is None else subject.digests[name],
        )
        made[add.sequence_id] = (name, add)
    return made


def check(subject: Subject, assembled: Any, recorder: Recorder, names: list[str | None]) -> None:
    asked = requests_of(subject, names)
    recorder.by_sequence.clear()
    for _, add in asked.values():
        assembled.engine.add(b"", add)
    run(assembled.engine)
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])


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


@pytest.mark.parametrize("is_gpu", [False, True], ids=["cpu", "gpu without kernels"])
def test_prompts_are_scored_with_the_trained_head(subject: TrainedSubject, is_gpu: bool) -> None:
    made = plain_backend(HostAccelerator()) if is_gpu else None
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, num_prompt_logprobs=2)
    asked = [
        (name, msgspec.structs.replace(add, sampling=sampling))
        for name, add in requests_of(subject, [None, "both", "tokens", "lora-of-head-and-tokens"]).values()
    ]
    scores, *_ = run_scoring(subject, made, asked, max_batch_tokens=16)
    for name, add in asked:
        logits = subject.reference_logits(name, list(add.prompt))[:-1]
        scored = scores[add.sequence_id]
        assert [one.token_id for one in scored] == list(add.prompt[1:])
        for one, row in zip(scored, torch.log_softmax(logits, dim=1), strict=True):
            assert abs(one.logprob - row[one.token_id]) <= 2 * TOLERANCE * logits.abs().max()


def test_rows_of_other_requests_keep_their_bits(subject: TrainedSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    assembled = subject.assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    check(subject, assembled, recorder, [None, "both", "plain", "tokens", None, "head-tokens", "plain"])
    executor = recorder.executor
    assert isinstance(executor, DirectExecutor)
    num_equal = num_changed = 0
    for batch, logits in recorder.steps:
        outer = executor._tables.outer_slots(batch.slots, batch.sample_rows)
        if outer is None:
            continue
        with_rows = np.union1d(outer.embedding[outer.embedding >= 0], outer.head[outer.head >= 0])
        without = np.where(np.isin(batch.slots, with_rows), np.int32(-1), batch.slots)
        expected = executor.logits(msgspec.structs.replace(batch, slots=without))
        for row, sample_row in enumerate(batch.sample_rows.tolist()):
            if batch.slots[sample_row] in with_rows:
                num_changed += not torch.equal(logits[row], expected[row])
            else:
                assert torch.equal(logits[row], expected[row])
                num_equal += 1
    assert num_equal >= 12
    assert num_changed >= 9
    assembled.adapters.close()


@pytest.mark.parametrize(
    "subject",
    [pytest.param(one, marks=() if one == UNTIED else pytest.mark.campaign) for one in (UNTIED, TIED)],
    indirect=True,
)
def test_the_gpu_path_equals_peft(subject: TrainedSubject, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    assembled = subject.assemble(backend, max_batch_tokens=32, max_sequences=8)
    recorder = Recorder(assembled.engine, monkeypatch)
    check(subject, assembled, recorder, [None, "both", "tokens", "other-tokens", "lora-of-head-and-tokens", "plain"])
    executor = recorder.executor
    assert isinstance(executor, GraphExecutor)
    assert any(shape.has_outer for shape in executor._graphs)
    assembled.engine.check_integrity()
    assembled.adapters.close()
