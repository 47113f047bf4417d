"""Adapters of resized models give the same logits as peft, and no other request can choose their tokens."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend
from loramux.engine.loop.assembly import AssembledEngine
from loramux.engine.loop.config import pack_target
from loramux.engine.protocol.messages import Add, Finished, SamplingParams, StepOutput
from tests.conformance.parity import TOLERANCE, Recorder, Subject, assert_parity
from tests.conformance.test_gpu_engine import plain_backend
from tests.conformance.test_prompt_logprobs import run as run_scoring
from tests.conformance.tiny_models import (
    SMALL_SHAPE,
    SMALL_WINDOW,
    VOCAB_SIZE,
    make_base,
    pack_peft_directory,
)
from tests.engine.device.gpu_backend import gpu_backend

pytestmark = pytest.mark.filterwarnings("ignore")

SOME = {"target_modules": ["q_proj", "down_proj"]}
BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}
FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (0, SOME),
    "trained": (3, {**SOME, **BOTH}),
    "copies": (70, SOME),
    "tokens": (2, {**SOME, "trainable_token_indices": [5, VOCAB_SIZE + 1, VOCAB_SIZE]}),
    "fewer": (-6, SOME),
    "fewer-trained": (-1, {**SOME, **BOTH}),
}
"""The number of tokens beyond the base's, and PEFT's settings."""

UNTIED, TIED = "llama", "qwen2"


@dataclass(frozen=True)
class ResizedSubject(Subject):
    base: Any
    saved: dict[str, Path]

    def vocab_size(self, name: str | None) -> int | None:
        return None if name is None else self.adapters[self.digests[name]].layout.rows.vocab_size

    @torch.no_grad()
    def reference_logits(self, name: str | None, tokens: list[int], num_prompt: int | None = None) -> torch.Tensor:
        model = copy.deepcopy(self.base)
        if name is not None:
            model.resize_token_embeddings(VOCAB_SIZE + FORMS[name][0])
            model = PeftModel.from_pretrained(model, self.saved[name]).eval()
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
        return logits

    def add(self, name: str | None, number: int, **sampling: Any) -> Add:
        """A request whose prompt contains all of the adapter's added tokens and ends with the last of them."""
        vocab_size = self.vocab_size(name)
        prompt = (number, 5, *range(7, 7 + number), *range(VOCAB_SIZE, vocab_size or VOCAB_SIZE))
        return Add(
            sequence_id=f"{number}-{name}",
            prompt=prompt,
            max_tokens=4,
            sampling=SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling}),
            digest=None if name is None else self.digests[name],
            vocab_size=vocab_size,
        )


def make_subject(family: str, directory: Path) -> ResizedSubject:
    base = make_base(family, directory / "base", SMALL_SHAPE, SMALL_WINDOW)
    target = pack_target(ModelConfig.load(directory / "base"), "float32")
    made = ResizedSubject(directory / "base", None, {}, {}, {}, base, {})
    for index, (name, (further, settings)) in enumerate(FORMS.items()):
        torch.manual_seed(index)
        resized = copy.deepcopy(base)
        resized.resize_token_embeddings(VOCAB_SIZE + further)
        config = LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
        model = get_peft_model(resized, config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.08 if "lora_" in parameter_name else 0.3)
        # Trained tokens of a tied base need no whole weight.
        is_whole = further and not (name == "tokens" and base.config.tie_word_embeddings)
        model.save_pretrained(directory / name, save_embedding_layers=bool(is_whole))
        packed = pack_peft_directory(directory / name, target, directory / "base")
        made.saved[name], made.digests[name] = directory / name, packed.digest
        made.adapters[packed.digest], made.num_pages[name] = packed, packed.num_pages
    return made


@pytest.fixture(scope="module", params=[UNTIED, pytest.param(TIED, marks=pytest.mark.campaign)])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ResizedSubject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.campaign)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend | None:
    return gpu_backend(monkeypatch) if request.param == "gpu" else None


def finish(assembled: AssembledEngine, adds: list[Add]) -> tuple[dict[str, list[int]], dict[str, Finished]]:
    for add in adds:
        assembled.engine.add(b"", add)
    while assembled.engine.has_work:
        assembled.engine.step()
    chosen: dict[str, list[int]] = {add.sequence_id: [] for add in adds}
    ended: dict[str, Finished] = {}
    for outbound in assembled.engine.take_outbox():
        if isinstance(outbound.message, Finished):
            ended[outbound.message.sequence_id] = outbound.message
        elif isinstance(outbound.message, StepOutput):
            for output in outbound.message.outputs:
                chosen[output.sequence_id] += output.token_ids
    return chosen, ended


def test_resized_adapters_equal_peft_beside_others(
    subject: ResizedSubject, backend: Backend | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = subject.assemble(backend, max_batch_tokens=512 if backend is None else 128, max_sequences=8)
    recorder = Recorder(assembled.engine, monkeypatch)
    names: list[str | None] = [None, *FORMS] if backend is None else [None, "trained", "tokens", "fewer"]
    adds = {name: subject.add(name, number) for number, name in enumerate(names, 1)}
    finish(assembled, list(adds.values()))
    for name, add in adds.items():
        assert_parity(subject, name, add, recorder.by_sequence[add.sequence_id])
    assembled.engine.check_integrity()
    assembled.adapters.close()


def test_each_request_chooses_among_its_own_tokens(subject: ResizedSubject, backend: Backend | None) -> None:
    """Biases, the most likely tokens, penalties and the rules of allowed tokens, in one batch."""
    assembled = subject.assemble(backend, max_batch_tokens=256, max_sequences=16)
    last = VOCAB_SIZE + 2
    hot = {"temperature": 1e6, "seed": 1}
    adds = [
        subject.add("trained", 1, logit_bias=((last, 100.0),)),
        subject.add("trained", 2, allowed_token_ids=(VOCAB_SIZE, last), frequency_penalty=2.0),
        subject.add("trained", 3, logit_bias=((last, 100.0),), stop_token_ids=(last,)),
        subject.add("trained", 4, bad_words=((last,),), logit_bias=((last, 100.0),)),
        *(subject.add(name, 5 + index, **hot, num_logprobs=5) for index, name in enumerate((None, "plain", "fewer"))),
        subject.add("fewer", 8, **hot, allowed_token_ids=tuple(range(VOCAB_SIZE - 20, VOCAB_SIZE - 6))),
        subject.add("trained", 9, **hot, top_k=VOCAB_SIZE + 3),
    ]
    adds = [msgspec.structs.replace(add, max_tokens=12) for add in adds]
    chosen, ended = finish(assembled, adds)
    assert all(one.reason == ("stop" if one.sequence_id.startswith("3-") else "length") for one in ended.values())
    assert chosen["1-trained"] == [last] * 12
    assert set(chosen["2-trained"]) == {VOCAB_SIZE, last}
    assert chosen["3-trained"] == []
    assert last not in chosen["4-trained"]
    for add in adds:
        assert max(chosen[add.sequence_id], default=0) < (add.vocab_size or VOCAB_SIZE)
    assembled.engine.check_integrity()
    assembled.adapters.close()


@pytest.mark.parametrize("is_gpu", [False, True], ids=["cpu", "gpu without kernels"])
def test_further_tokens_of_prompts_are_scored(subject: ResizedSubject, is_gpu: bool) -> None:
    made = plain_backend(HostAccelerator()) if is_gpu else None
    names = [None, "trained", "fewer"]
    asked = [(name, subject.add(name, number, num_prompt_logprobs=2)) for number, name in enumerate(names, 1)]
    scores, *_ = run_scoring(subject, made, asked, max_batch_tokens=16)
    for name, add in asked:
        logits = subject.reference_logits(name, list(add.prompt))[:-1]
        for one, row in zip(scores[add.sequence_id], torch.log_softmax(logits, dim=1), strict=True):
            assert abs(one.logprob - row[one.token_id]) <= 2 * TOLERANCE * logits.abs().max()
            assert one.rank <= len(row)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        pytest.param("plain", {"vocab_size": VOCAB_SIZE + 3}, "not that of the adapter", id="more"),
        pytest.param("trained", {"vocab_size": VOCAB_SIZE + 2, "prompt": (1,)}, "not that of the adapter", id="other"),
        pytest.param("trained", {"vocab_size": None, "prompt": (1,)}, "not that of the adapter", id="the base's"),
        pytest.param(None, {"vocab_size": VOCAB_SIZE + 3}, "null without an adapter", id="no adapter"),
        pytest.param("trained", {"vocab_size": VOCAB_SIZE + 513}, "must be the size", id="too many"),
        pytest.param("trained", {"prompt": (VOCAB_SIZE + 3,)}, "token ids must be in", id="a token beyond"),
        pytest.param("fewer", {"prompt": (VOCAB_SIZE - 6,)}, "token ids must be in", id="a token of the base"),
    ],
)
def test_a_request_that_misstates_the_vocabulary_is_refused(
    subject: ResizedSubject, name: str | None, changes: dict[str, Any], message: str
) -> None:
    assembled = subject.assemble()
    add = msgspec.structs.replace(subject.add(name, 1), **changes)
    _, ended = finish(assembled, [add])
    assert ended[add.sequence_id].code == "invalid_request"
    assert message in (ended[add.sequence_id].message or "")
    assembled.engine.check_integrity()
    assembled.adapters.close()
