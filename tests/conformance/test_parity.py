"""Logits and greedy tokens equal the results of transformers and peft, one request at a time and in one mixed batch.

The main families run the mixed batch. `make campaign NAME=parity` adds the other families and the rest of the matrix.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import Phi3ForCausalLM

from loramux.engine.execution.direct_executor import DirectExecutor
from loramux.engine.protocol.messages import Add, SamplingParams, StatsRequest
from tests.conformance.parity import TOLERANCE, Recorder, Subject, assert_parity, load, make_subject, run
from tests.conformance.tiny_models import (
    ALL_LINEARS,
    EVERY_FAMILY,
    FAMILIES,
    PHI3_ORIGINAL_LEN,
    PLANS,
    SMALL_SHAPE,
    SMALL_WINDOW,
    VOCAB_SIZE,
    AdapterPlan,
    make_base,
)

ALONE = ("llama", "gemma2", "phi3-window")
"""Families that every test run also compares one request at a time. Together they cover every branch of the decoder."""

STEPS = [
    pytest.param(128, 16, id="chunks"),
    pytest.param(64, 45, id="shorter chunks", marks=pytest.mark.campaign),
    pytest.param(24, 160, id="small chunks", marks=pytest.mark.campaign),
    pytest.param(700, 45, id="whole prompts", marks=pytest.mark.campaign),
]
"""Token rows per step, and answer lengths. The first request must still run when the last prompt is finished."""

PROMPT_LENGTHS = [1, 7, 16, 17, 33, 64, 65, 100, 129, 200, 270, 300]
FEW_TOKENS = 6


@pytest.fixture(scope="module", params=EVERY_FAMILY)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param))


def requests(subject: Subject, max_tokens: int) -> dict[str, tuple[str | None, Add]]:
    names: list[str | None] = [None, "r1", "r3", None, "r4", "r8", None, "r31", "by-layer", None, "r16", "r64"]
    generator = torch.Generator().manual_seed(11)
    made = {}
    for index, (name, length) in enumerate(zip(names, PROMPT_LENGTHS, strict=True)):
        prompt = torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()
        add = Add(
            sequence_id=f"{index}-{name}-{length}",
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            digest=None if name is None else subject.digests[name],
        )
        made[add.sequence_id] = (name, add)
    return made


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_decode_steps_run_as_programs_on_all_threads(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assembled = subject.assemble(num_threads=len(os.sched_getaffinity(0)))
    executor = assembled.engine._executor
    assert isinstance(executor, DirectExecutor)
    assert executor._recorded is not None
    recorder = Recorder(assembled.engine, monkeypatch)
    for names in ((None,), ("r4", "r16")):
        asked = {one: asked for one, asked in requests(subject, FEW_TOKENS).items() if asked[0] in names}
        for _, add in asked.values():
            assembled.engine.add(b"", add)
        run(assembled.engine)
        for sequence_id, (name, add) in asked.items():
            assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    programs = executor._recorded._steps
    # Steps of the base, and steps with adapters.
    assert {groups > 0 for _, groups in programs} == {False, True}
    assert all(programs.values())
    assembled.adapters.close()


@pytest.mark.parametrize(
    "subject",
    [pytest.param(family, marks=() if family in ALONE else pytest.mark.campaign) for family in FAMILIES],
    indirect=True,
)
def test_each_request_alone_equals_transformers_and_peft(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assembled = subject.assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    for sequence_id, (name, add) in requests(subject, FEW_TOKENS).items():
        assembled.engine.add(b"", add)
        run(assembled.engine)
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    assembled.adapters.close()


@pytest.mark.parametrize(("step_tokens", "max_tokens"), STEPS)
def test_one_mixed_batch_equals_transformers_and_peft(
    subject: Subject, step_tokens: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = subject.assemble(max_batch_tokens=step_tokens)
    load(assembled.engine, subject.digests.values())
    recorder = Recorder(assembled.engine, monkeypatch)
    asked = requests(subject, max_tokens)
    for _, add in asked.values():
        assembled.engine.add(b"", add)
    run(assembled.engine)
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    stats = assembled.engine.stats(StatsRequest(call_id=""))
    assert stats.max_adapters_in_step == len(PLANS)
    # Resident adapters take exactly the pages that were packed.
    assert stats.num_adapter_pages == sum(subject.num_pages.values())
    assert stats.num_kv_pages == 0
    assembled.engine.check_integrity()

    # Rows of the base are bit-equal to the same batch without adapters.
    executor = recorder.executor
    assert isinstance(executor, DirectExecutor)
    num_compared = num_changed = 0
    for batch, logits in recorder.steps:
        expected = executor.logits(msgspec.structs.replace(batch, slots=np.full_like(batch.slots, -1)))
        for row, sample_row in enumerate(batch.sample_rows.tolist()):
            if batch.slots[sample_row] < 0:
                assert torch.equal(logits[row], expected[row])
                num_compared += 1
            else:
                num_changed += not torch.equal(logits[row], expected[row])
    assert num_compared == 4 * max_tokens
    assert num_changed == len(PLANS) * max_tokens
    assembled.adapters.close()


OUTER_PLANS = [
    AdapterPlan("embedding", 3, ["embed_tokens"], alpha=6.0),
    AdapterPlan("head", 5, ["lm_head"], alpha=3.0, lora_bias=True),
    AdapterPlan(
        "all",
        16,
        ["embed_tokens", "lm_head", *ALL_LINEARS],
        rank_pattern={"lm_head": 33},
        use_rslora=True,
        use_dora=True,
        alpha=4.0,
    ),
    AdapterPlan("inner", 4, ["q_proj", "down_proj"], alpha=8.0),
]
"""Adapters of the embedding, of the head, of all modules, and of the layers only."""

UNTIED, TIED = "llama", "qwen2"


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=() if one in (UNTIED, TIED) else pytest.mark.campaign) for one in FAMILIES],
)
def outer_subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp(f"outer-{request.param}")
    return make_subject(request.param, directory, OUTER_PLANS, SMALL_SHAPE, SMALL_WINDOW)


def outer_requests(subject: Subject, *names: str | None) -> dict[str, tuple[str | None, Add]]:
    """Requests with prompts shorter and longer than a step's budget, in one batch."""
    generator = torch.Generator().manual_seed(5)
    made: dict[str, tuple[str | None, Add]] = {}
    for index, name in enumerate(names):
        prompt = torch.randint(2, VOCAB_SIZE, (1 + 17 * index,), generator=generator).tolist()
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        digest = None if name is None else subject.digests[name]
        add = Add(sequence_id=f"{index}-{name}", prompt=tuple(prompt), max_tokens=12, sampling=sampling, digest=digest)
        made[add.sequence_id] = (name, add)
    return made


def test_adapters_of_the_embedding_and_the_head_equal_peft(
    outer_subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = outer_subject.assemble()
    load(assembled.engine, outer_subject.digests.values())
    recorder = Recorder(assembled.engine, monkeypatch)
    asked = outer_requests(outer_subject, "all", None, "embedding", "head", "inner", "all", None, "head")
    for _, add in asked.values():
        assembled.engine.add(b"", add)
    run(assembled.engine)
    for sequence_id, (name, add) in asked.items():
        assert_parity(outer_subject, name, add, recorder.by_sequence[sequence_id])
    stats = assembled.engine.stats(StatsRequest(call_id=""))
    assert stats.max_adapters_in_step == len(OUTER_PLANS)
    assert stats.num_adapter_pages == sum(outer_subject.num_pages.values())

    # Rows of the base and of adapters without embedding or head are computed as if the other adapters were absent.
    executor = recorder.executor
    assert isinstance(executor, DirectExecutor)
    tables = executor._tables
    num_equal = 0
    for batch, logits in recorder.steps:
        outer = tables.outer_slots(batch.slots, batch.sample_rows)
        if outer is None:
            # The state of a hybrid decoder must pass through every step.
            executor.logits(batch)
            continue
        without = np.where(outer.embedding >= 0, np.int32(-1), batch.slots)
        has_head = np.isin(without, outer.head[outer.head >= 0])
        expected = executor.logits(msgspec.structs.replace(batch, slots=np.where(has_head, np.int32(-1), without)))
        for row, sample_row in enumerate(batch.sample_rows.tolist()):
            if outer.embedding[sample_row] < 0 and outer.head[row] < 0:
                assert torch.equal(logits[row], expected[row])
                num_equal += 1
            else:
                assert not torch.equal(logits[row], expected[row])
    assert num_equal > 12
    assembled.adapters.close()


def test_a_batch_without_such_adapters_launches_nothing_for_them(
    outer_subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = outer_subject.assemble()
    executor = assembled.engine._executor
    assert isinstance(executor, DirectExecutor)
    resident = outer_requests(outer_subject, "all")
    for _, add in resident.values():
        assembled.engine.add(b"", add)
    run(assembled.engine)
    # Make any call of these kernels fail.
    monkeypatch.setattr(executor._kernels, "outer", None)
    recorder = Recorder(assembled.engine, monkeypatch)
    asked = outer_requests(outer_subject, None, "inner")
    for _, add in asked.values():
        assembled.engine.add(b"", add)
    run(assembled.engine)
    for sequence_id, (name, add) in asked.items():
        assert_parity(outer_subject, name, add, recorder.by_sequence[sequence_id])
    assembled.adapters.close()


@pytest.mark.parametrize(
    ("max_model_len", "num_prompt"),
    [(PHI3_ORIGINAL_LEN, PHI3_ORIGINAL_LEN - FEW_TOKENS), (1024, PHI3_ORIGINAL_LEN + 1)],
    ids=["short", "long"],
)
def test_longrope_follows_the_longest_context_that_is_served(
    max_model_len: int, num_prompt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers chooses the factors by the current length of a sequence. Logits agree if both choose the same."""
    make_base("phi3-longrope", tmp_path)
    untouched = Phi3ForCausalLM.from_pretrained(tmp_path).eval()
    assembled = Subject(tmp_path, untouched, {}, {}, {}).assemble(max_model_len=max_model_len)
    recorder = Recorder(assembled.engine, monkeypatch)
    prompt = torch.randint(2, VOCAB_SIZE, (num_prompt,), generator=torch.Generator().manual_seed(2)).tolist()
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    assembled.engine.add(b"", Add(sequence_id="one", prompt=tuple(prompt), max_tokens=FEW_TOKENS, sampling=sampling))
    run(assembled.engine)
    ours = torch.stack(recorder.by_sequence["one"])
    generated = ours.argmax(-1).tolist()
    with torch.no_grad():
        theirs = untouched(input_ids=torch.tensor([[*prompt, *generated[:-1]]])).logits[0, num_prompt - 1 :]
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
    assembled.adapters.close()
