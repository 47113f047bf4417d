"""Eight adapters of each form that PEFT writes, in one mixed batch, give the same logits as peft."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.variants import calculate_alora_offsets

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import pack_target
from loramux.engine.protocol.messages import Add, SamplingParams, StatsRequest
from loramux.engine.sequences.activation import activation
from tests.conformance.parity import Recorder, Subject, assert_parity, load, run
from tests.conformance.tiny_models import (
    ALL_LINEARS,
    ATTENTION,
    SMALL_SHAPE,
    SMALL_WINDOW,
    VOCAB_SIZE,
    make_base,
    pack_peft_directory,
)

# peft warns about merging, which this test never does.
pytestmark = pytest.mark.filterwarnings("ignore")

INVOCATION = [7, 8]
TOKENS = [3, 11, 160, VOCAB_SIZE - 1]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ALL_LINEARS},
    "rslora": {"target_modules": ALL_LINEARS, "use_rslora": True},
    "dora": {"target_modules": ALL_LINEARS, "use_dora": True},
    "bias": {"target_modules": ATTENTION, "lora_bias": True},
    "lora-of-head": {"target_modules": ["q_proj", "lm_head"]},
    "lora-of-embedding": {"target_modules": ["v_proj", "embed_tokens"]},
    "trained-head": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
    "trained-embedding": {"target_modules": ["up_proj"], "modules_to_save": ["embed_tokens"]},
    "trained-tokens": {"target_modules": ["down_proj"], "trainable_token_indices": TOKENS},
    "activated": {"target_modules": ALL_LINEARS, "alora_invocation_tokens": INVOCATION},
    "added-tokens": {"target_modules": ALL_LINEARS, "modules_to_save": ["lm_head", "embed_tokens"]},
}
RANKS = (1, 2, 3, 4, 8, 16, 31, 33)
NUM_TOKENS = 3


@dataclass(frozen=True)
class FormsSubject(Subject):
    base: Any
    saved: dict[str, Path]

    def vocab_size(self, name: str) -> int | None:
        return self.adapters[self.digests[name]].layout.rows.vocab_size

    @torch.no_grad()
    def reference_logits(self, name: str | None, tokens: list[int], num_prompt: int | None = None) -> torch.Tensor:
        # PEFT may overwrite the base's weights, so load each adapter into a copy.
        model, settings = copy.deepcopy(self.base), {}
        if name is not None:
            if (vocab_size := self.vocab_size(name)) is not None:
                model.resize_token_embeddings(vocab_size)
            model = PeftModel.from_pretrained(model, self.saved[name]).eval()
            if name.startswith("activated"):
                prompt = torch.tensor([tokens[:num_prompt]])
                [offset] = calculate_alora_offsets(model.peft_config, "default", prompt)
                # The offset is relative to the end, which moves with each generated token.
                settings["alora_offsets"] = [None if offset is None else offset + len(tokens) - prompt.shape[1]]
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), **settings).logits[0]
        return logits


def make_forms(family: str, num_adapters: int, directory: Path) -> FormsSubject:
    base = make_base(family, directory / "base", SMALL_SHAPE, SMALL_WINDOW)
    target = pack_target(ModelConfig.load(directory / "base"), "float32")
    subject = FormsSubject(directory / "base", None, {}, {}, {}, base, {})
    for form, settings in FORMS.items():
        for rank in RANKS[:num_adapters]:
            name = f"{form}-{rank}"
            torch.manual_seed(len(subject.saved))
            config = LoraConfig(r=rank, lora_alpha=2 * rank, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
            resized = copy.deepcopy(base)
            if form == "added-tokens":
                resized.resize_token_embeddings(VOCAB_SIZE + 2 * rank)
            model = get_peft_model(resized, config)
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if "lora_magnitude" in parameter_name:
                        parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
                    elif parameter.requires_grad:
                        parameter.normal_(0, 0.05 if "lora_" in parameter_name else 0.3)
            model.save_pretrained(directory / name, save_embedding_layers=False)
            packed = pack_peft_directory(directory / name, target, directory / "base")
            subject.saved[name], subject.digests[name] = directory / name, packed.digest
            subject.adapters[packed.digest], subject.num_pages[name] = packed, packed.num_pages
    return subject


def requests(subject: FormsSubject) -> dict[str, tuple[str | None, Add]]:
    """A request for each adapter, and every tenth for the base. Two thirds of the prompts contain the invocation."""
    generator = torch.Generator().manual_seed(3)
    names: list[str | None] = []
    for index, name in enumerate(subject.saved):
        names += [None, name] if index % 10 == 0 else [name]
    made: dict[str, tuple[str | None, Add]] = {}
    for index, name in enumerate(names):
        prompt = [*TOKENS, *torch.randint(VOCAB_SIZE, (3 + index % 17,), generator=generator).tolist()]
        if index % 3:
            prompt[index % 5 : index % 5] = INVOCATION
        vocab_size = None if name is None else subject.vocab_size(name)
        if vocab_size is not None:
            prompt += range(VOCAB_SIZE, vocab_size, 2)
        position = activation(prompt, INVOCATION) if name is not None and name.startswith("activated") else 0
        add = Add(
            sequence_id=f"{index}-{name}",
            prompt=tuple(prompt),
            max_tokens=NUM_TOKENS,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            digest=None if name is None or position is None else subject.digests[name],
            activation=position or 0,
            vocab_size=vocab_size,
        )
        made[add.sequence_id] = (name, add)
    return made


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("family", "num_adapters"),
    [
        pytest.param("llama", 1, id="one of each"),
        *(
            pytest.param(family, len(RANKS), marks=pytest.mark.campaign, id=family)
            for family in ("llama", "qwen2", "gemma2")
        ),
    ],
)
def test_all_forms_in_one_batch_equal_peft(
    family: str, num_adapters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = make_forms(family, num_adapters, tmp_path)
    asked = requests(subject)
    assembled = subject.assemble(
        max_sequences=len(asked), max_resident_adapters=len(asked), max_batch_tokens=4096, pool_bytes=512 << 20
    )
    load(assembled.engine, {add.digest for _, add in asked.values() if add.digest is not None})
    recorder = Recorder(assembled.engine, monkeypatch)
    for _, add in asked.values():
        assembled.engine.add(b"", add)
    run(assembled.engine)
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    stats = assembled.engine.stats(StatsRequest(call_id=""))
    num_loaded = len({add.digest for _, add in asked.values() if add.digest is not None})
    assert stats.max_adapters_in_step == num_loaded >= 0.9 * len(subject.saved)
    assembled.engine.check_integrity()
    assembled.adapters.close()
