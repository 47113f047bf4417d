"""Drafters of adapters: the head's logits against the formula, and answers with drafters against those without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.packing import PackedAdapter, pack
from loramux.adapter_store.validation.validation import validate_files
from loramux.engine.architectures.draft_head import DraftHeadNames
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.decoder.draft_head import DraftHead
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.drafting.step_times import StepTimes
from loramux.engine.loop.config import pack_target
from loramux.engine.parallel.sharded_adapters import AdapterDivider
from loramux.engine.parallel.sharding import module_shards, worker_config
from loramux.engine.protocol.messages import Add, DraftCounts, StatsRequest
from loramux.engine.sequences.batch import StepInputs
from tests.conformance.draft_heads import Tensors, add_head, head_tensors
from tests.conformance.drafters import add_drafter, drafter_names, random_drafter
from tests.conformance.parity import TOLERANCE, Subject, load, make_subject
from tests.conformance.test_draft_heads import (
    GREEDY,
    HIDDEN,
    always_right,
    answers_of,
    echo,
    expected_logits,
)
from tests.conformance.test_drafts import Answer, check, drawn, run
from tests.conformance.test_gpu_engine import PATHS, gpu_path
from tests.conformance.tiny_models import ALL_LINEARS, SMALL_SHAPE, AdapterPlan, pack_peft_directory
from tests.engine.device.gpu_backend import plain_backend

PLANS = [
    AdapterPlan("r1", 1, ["v_proj"], alpha=2.0),
    AdapterPlan("r8", 8, ALL_LINEARS, alpha=12.0, use_rslora=True),
    AdapterPlan("d4", 4, ["q_proj", "o_proj"], alpha=6.0, use_dora=True),
]


@pytest.fixture(autouse=True)
def free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts do not depend on how long steps take on this machine: rows and the head count as free."""
    monkeypatch.setattr(StepTimes, "ratio", lambda times, num_rows, num_more: 1.0)
    monkeypatch.setattr(StepTimes, "seconds", lambda times, num_rows: 0.0)


@dataclass
class Made:
    """A base with a head, its adapters, and adapters with drafters, whose names end with `+` and the drafter's name."""

    subject: Subject
    names: DraftHeadNames
    adapters: Path

    def add(self, adapter: str, drafter: str, tensors: Tensors, **config: Any) -> PackedAdapter:
        name = f"{adapter}+{drafter}"
        made = add_drafter(self.adapters / adapter, tensors, self.adapters / name, **config)
        return self.note(name, pack_peft_directory(made, self.target, self.subject.directory))

    def note(self, name: str, packed: PackedAdapter) -> PackedAdapter:
        self.subject.digests[name] = packed.digest
        self.subject.adapters[packed.digest] = packed
        self.subject.num_pages[name] = packed.num_pages
        return packed

    @property
    def target(self) -> Any:
        return pack_target(ModelConfig.load(self.subject.directory), "float32")

    def modules(self) -> dict[str, tuple[int, int]]:
        """The numbers of inputs and outputs of the head's modules."""
        prefix = f"{self.names.prefix}."
        return {one.name.removeprefix(prefix): (one.in_features, one.out_features) for one in self.target.draft_modules}


def corrected(head: Tensors, drafter: Tensors, names: DraftHeadNames, scale: float) -> Tensors:
    """The head's tensors with a drafter merged into them."""
    merged, prefix = dict(head), f"base_model.model.{names.prefix}."
    for a_name in [name for name in drafter if name.endswith("lora_A.weight")]:
        module = a_name.removeprefix(prefix).removesuffix(".lora_A.weight")
        weight = head[f"{module}.weight"] + scale * (drafter[drafter_names(names, module)[1]] @ drafter[a_name])
        merged[f"{module}.weight"] = weight
    return merged


@pytest.mark.parametrize("path", ["cpu", *PATHS])
@pytest.mark.parametrize("family", ["mimo", pytest.param("glm4_moe", marks=pytest.mark.campaign)])
def test_drafters_change_the_heads_logits_of_their_own_rows_only(
    family: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of the base and of adapters with and without a drafter, of any rank, with rsLoRA or beside DoRA."""
    subject = make_subject(family, tmp_path, PLANS, SMALL_SHAPE)
    made = Made(subject, add_head(subject.directory), tmp_path / "adapters")
    names, head = made.names, head_tensors(subject.directory)
    of_r8 = random_drafter(names, made.modules(), 5)
    pattern = {f"{names.prefix}.{module}": 5 for module in made.modules()}
    made.add("r8", "random", of_r8, rank_pattern=pattern, alpha_pattern=dict.fromkeys(pattern, 5.0))
    of_d4 = random_drafter(names, made.modules(), 4)
    made.add("d4", "random", of_d4)
    heads = {
        None: head,
        "r8": head,
        "r8+random": corrected(head, of_r8, names, 5.0 / 5**0.5),
        "d4+random": corrected(head, of_d4, names, 6.0 / 4),
    }
    compute, found = DraftHead.logits, list[tuple[int, int, int, int, torch.Tensor]]()

    def recording(
        one: DraftHead, inputs: StepInputs, states: torch.Tensor, next_tokens: torch.Tensor, *others: Any
    ) -> torch.Tensor:
        logits = compute(one, inputs, states, next_tokens, *others)
        # Copies, because the buffers of a captured step are overwritten.
        rows = (one.tolist() for one in (inputs.slots, inputs.positions, inputs.tokens, next_tokens))
        found.extend(zip(*rows, logits, strict=True))
        return logits

    backend = None if path == "cpu" else gpu_path(path, monkeypatch)
    assembled = subject.assemble(backend, speculate="head", max_batch_tokens=32)
    adapters = [name for name in heads if name is not None]
    load(assembled.engine, [subject.digests[name] for name in adapters])
    monkeypatch.setattr(DraftHead, "logits", recording)
    adds = [
        Add(
            sequence_id=str(name),
            prompt=tuple((7 * place + 11 * index) % 50 + 2 for place in range(12 + 9 * index)),
            max_tokens=20,
            sampling=GREEDY,
            digest=None if name is None else subject.digests[name],
        )
        for index, name in enumerate(heads)
    ]
    answers = answers_of(assembled.engine, adds)
    slots = {None: -1, **{name: slot for slot, name in enumerate(adapters)}}
    assembled.close()
    for name, add in zip(heads, adds, strict=True):
        tokens = [*add.prompt, *answers[add.sequence_id].tokens]
        adapter = None if name is None else name.partition("+")[0]
        expected = expected_logits(subject, names, tokens, adapter, heads[name])
        compared = 0
        for slot, position, token, next_token, logits in found:
            # The rows of rejected drafts have other tokens. Tokens in flight are negative.
            if slot == slots[name] and [token, next_token] == tokens[position : position + 2]:
                theirs = expected[position]
                assert (logits - theirs).abs().max() <= TOLERANCE * theirs.abs().max(), name
                compared += 1
        assert compared >= 3, name


RIGHT = {"rank_pattern": {"mtp_layers.0.input_proj": HIDDEN}, "alpha_pattern": {"mtp_layers.0.input_proj": HIDDEN}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A base whose answers follow from the last token, with a head that is always wrong. `r1` does not change answers.
    `r1+right` has a drafter that makes the head right, and `r1+NaN` one whose products are not finite.
    """
    directory = tmp_path_factory.mktemp("mimo")
    subject = make_subject("mimo", directory, PLANS[:2], SMALL_SHAPE)
    path = subject.directory / "model.safetensors"
    tensors = load_file(path)
    echo(tensors)
    for name, one in tensors.items():
        if "norm" in name:
            one.fill_(1.0)
    save_file(tensors, path)
    names = add_head(subject.directory, partial(always_right, factor=-1.0))
    made = Made(subject, names, directory / "adapters")
    a_name, b_name = drafter_names(names, "input_proj")
    right = {a_name: torch.eye(HIDDEN, 2 * HIDDEN).roll(HIDDEN, dims=1).contiguous(), b_name: 2 * torch.eye(HIDDEN)}
    made.add("r1", "right", right, **RIGHT)
    made.add("r8", "random", random_drafter(names, made.modules(), 8))
    # Validation would refuse these values.
    folder = add_drafter(directory / "adapters" / "r1", right, directory / "adapters" / "r1+NaN", **RIGHT)
    report = validate_files(
        (folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors", made.target
    )
    stored = load_file(folder / "adapter_model.safetensors")
    stored[b_name].fill_(torch.nan)
    save_file(stored, folder / "adapter_model.safetensors")
    write_canonical(folder / "adapter_model.safetensors", report.scales, folder / "canonical", report.names)
    made.note("r1+NaN", pack(folder / "canonical", made.target))
    return made


@pytest.fixture(scope="module")
def adds(made: Made) -> list[Add]:
    """Mixed requests of the base and of adapters with and without drafters, and one greedy request of each."""
    others = [
        Add(sequence_id=f"{100 + number}", prompt=(5, 6, 7), max_tokens=20, sampling=GREEDY, digest=digest)
        for number, digest in enumerate([None, *made.subject.digests.values()])
    ]
    return [*(drawn(made.subject, number) for number in range(12)), *others]


@pytest.fixture(scope="module")
def plain_answers(made: Made, adds: list[Add]) -> dict[str, Answer]:
    return run(made.subject, adds, None, "off", 60)[0]


def test_answers_are_the_same_with_drafters(made: Made, adds: list[Add], plain_answers: dict[str, Answer]) -> None:
    found, drafts, _ = run(made.subject, adds, None, "head", 60)
    check(adds, found, plain_answers)
    assert drafts.head_tokens > drafts.accepted_head_tokens
    assert drafts.drafter_tokens > drafts.accepted_drafter_tokens > 0
    # They are also the same where the base's head is not used, which ignores drafters.
    check(adds, run(made.subject, adds, None, "text", 60)[0], plain_answers)


def counts_of(made: Made, names: list[str | None], **settings: Any) -> DraftCounts:
    assembled = made.subject.assemble(speculate="head", **settings)
    adds = [
        Add(
            sequence_id=f"{number}",
            prompt=(5, 6, 7),
            max_tokens=41,
            sampling=GREEDY,
            digest=None if name is None else made.subject.digests[name],
        )
        for number, name in enumerate(names)
    ]
    answers_of(assembled.engine, adds)
    drafts = assembled.engine.stats(StatsRequest(call_id="")).drafts
    assembled.close()
    return drafts


@pytest.mark.parametrize("path", ["cpu", "gpu"])
def test_a_right_drafter_makes_drafts_right_for_its_version_only(made: Made, path: str) -> None:
    settings: dict[str, Any] = {} if path == "cpu" else {"backend": plain_backend(HostAccelerator())}
    without = counts_of(made, [None, "r1"], **settings)
    assert without.head_tokens > without.accepted_head_tokens == without.drafter_tokens == 0
    alone = counts_of(made, ["r1+right"], **settings)
    assert alone.drafter_tokens == alone.accepted_drafter_tokens > 15
    assert alone.head_tokens == 0
    # In one batch, only the drafts of its version become right.
    together = counts_of(made, ["r1+right", None, "r1"], **settings)
    assert together.head_tokens > together.accepted_head_tokens == 0
    assert together.drafter_tokens == together.accepted_drafter_tokens >= alone.drafter_tokens - 1


def test_a_drafter_can_be_stored_in_fp8(made: Made) -> None:
    folder = made.adapters / "r1+right"
    target = pack_target(ModelConfig.load(made.subject.directory), "float32", "fp8")
    packed = pack_peft_directory(folder, target, made.subject.directory)
    subject = replace(made.subject, adapters={packed.digest: packed}, digests={"r1+right": packed.digest})
    drafts = counts_of(replace(made, subject=subject), ["r1+right"], adapter_dtype="fp8")
    assert drafts.drafter_tokens == drafts.accepted_drafter_tokens > 15


def test_a_drafter_whose_logits_are_not_finite_only_ends_its_drafts(
    made: Made, plain_answers: dict[str, Answer], adds: list[Add]
) -> None:
    drafts = counts_of(made, ["r1+NaN"])
    assert drafts.head_tokens == drafts.drafter_tokens == 0
    digest = made.subject.digests["r1+NaN"]
    own = [add for add in adds if add.digest == digest]
    assembled = made.subject.assemble(speculate="head")
    assembled.head_views.raw.fill_(0xFF)  # type: ignore[union-attr]
    found = answers_of(assembled.engine, own)
    assert {name: one.tokens for name, one in found.items()} == {
        add.sequence_id: plain_answers[add.sequence_id].tokens for add in own
    }
    # A later request gets pages in which the drafter has left K and V that are not finite.
    [later] = answers_of(
        assembled.engine, [Add(sequence_id="b", prompt=tuple(range(2, 40)), max_tokens=9, sampling=GREEDY)]
    ).values()
    assert later.end is not None
    assert later.end.reason == "length"
    stats = assembled.engine.stats(StatsRequest(call_id=""))
    assembled.close()
    assert [one.digest for one in stats.adapters] == [digest]
    assert stats.drafts.head_tokens > 0


def test_a_prefix_before_an_activation_is_computed_without_the_drafter(made: Made) -> None:
    """So another model can continue it: also with `share_base_cache`, which activates adapters late."""
    assembled = made.subject.assemble(speculate="head")
    prompt = tuple(range(2, 60))
    ask = partial(Add, prompt=prompt, max_tokens=9, sampling=GREEDY, isolation_key=b"one")
    activated = ask(sequence_id="a", digest=made.subject.digests["r1+NaN"], activation=len(prompt) - 2)
    answers_of(assembled.engine, [activated])
    assert assembled.engine.stats(StatsRequest(call_id="")).drafts.head_tokens == 0
    [answer] = answers_of(assembled.engine, [ask(sequence_id="b")]).values()
    stats = assembled.engine.stats(StatsRequest(call_id=""))
    assembled.close()
    assert answer.end is not None
    assert answer.end.cached_tokens == 48
    assert stats.drafts.head_tokens > 0


def test_workers_get_no_drafters(made: Made) -> None:
    model, size = ModelConfig.load(made.subject.directory), 2
    own = pack_target(worker_config(model, size), "float32")
    divider = AdapterDivider(made.target, own, [module_shards(model, size, worker) for worker in range(size)])
    adapters = {name: made.subject.adapters[made.subject.digests[name]] for name in ("r8", "r8+random")}
    plain, drafting = (divider.shares_of(adapters[name]) for name in ("r8", "r8+random"))
    for one, other in zip(plain, drafting, strict=True):
        np.testing.assert_array_equal(one.payload, other.payload)
        np.testing.assert_array_equal(one.outer_scales, other.outer_scales)
    assert adapters["r8+random"].num_pages > adapters["r8"].num_pages
