"""Hybrid decoders: files that contradict their configuration, and the life of a sequence's state."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.assembly import AssembledEngine
from loramux.engine.protocol.errors import ModelNotSupported, PoolTooSmall
from loramux.engine.protocol.messages import Add, Finished, SamplingParams, StatsRequest
from tests.conformance.parity import Recorder, Subject, assert_parity, make_subject
from tests.conformance.test_gpu_engine import PATHS, gpu_path
from tests.conformance.tiny_models import ALL_LINEARS, SMALL_SHAPE, AdapterPlan, make_base

PLANS = [AdapterPlan("r4", 4, ALL_LINEARS, use_dora=True), AdapterPlan("r2", 2, ["v_proj", "down_proj"])]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
POISON = 2


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject("qwen3_5", tmp_path_factory.mktemp("qwen3_5"), PLANS, SMALL_SHAPE)


def requests(subject: Subject, lengths: Iterable[int], max_tokens: int) -> dict[str, tuple[str | None, Add]]:
    generator = torch.Generator().manual_seed(3)
    made: dict[str, tuple[str | None, Add]] = {}
    for index, length in enumerate(lengths):
        name = (None, "r4", "r2")[index % 3]
        add = Add(
            sequence_id=str(index),
            prompt=tuple(torch.randint(3, 320, (length,), generator=generator).tolist()),
            max_tokens=max_tokens,
            sampling=GREEDY,
            digest=None if name is None else subject.digests[name],
            isolation_key=b"tenant",
        )
        made[add.sequence_id] = name, add
    return made


def finish(assembled: AssembledEngine, adds: Iterable[Add]) -> dict[str, Finished]:
    for add in adds:
        assembled.engine.add(b"", add)
    ends: dict[str, Finished] = {}
    while assembled.engine.has_work:
        assembled.engine.step()
        for outbound in assembled.engine.take_outbox():
            if isinstance(outbound.message, Finished):
                ends[outbound.message.sequence_id] = outbound.message
    assembled.engine.check_integrity()
    return ends


def run(assembled: AssembledEngine, adds: Iterable[Add]) -> dict[str, Finished]:
    ends = finish(assembled, adds)
    assembled.adapters.close()
    return ends


def test_a_mixed_batch_in_a_pool_that_preempts_equals_transformers_and_peft(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = ModelConfig.load(subject.directory).geometry(4, 4)
    num_state_pages = ModelConfig.load(subject.directory).num_state_pages(geometry)
    num_adapter_pages = sum(subject.num_pages.values())
    # Room for both adapters and three states, but not for all K and V of three sequences.
    pool_bytes = (num_adapter_pages + 3 * num_state_pages + 6) * geometry.total_page_bytes
    assembled = subject.assemble(pool_bytes=pool_bytes, max_batch_tokens=24)
    recorder = Recorder(assembled.engine, monkeypatch)
    asked = requests(subject, (1, 20, 3, 17, 40), max_tokens=45)
    ends = run(assembled, [add for _, add in asked.values()])
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
        assert ends[sequence_id].cached_tokens == 0
    assert any(batch.max_q > 1 and 1 in batch.cu_q[1:] - batch.cu_q[:-1] for batch, _ in recorder.steps)
    assert assembled.engine.stats(StatsRequest(call_id="")).num_preemptions > 0


KINDS = {"first": 0, "second": 128, "no cache": 0}
"""Numbers of cached tokens of prompts that share 150 tokens. A page holds K and V of 32 tokens."""


def ask_with_a_shared_prefix(
    subject: Subject, assembled: AssembledEngine, names: tuple[str | None, ...]
) -> dict[str, tuple[str | None, Add]]:
    """Send a prompt to each adapter or the base, and then, in one batch, the prompt with another end, with and without
    the prefix cache.
    """
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 320, (count,), generator=generator).tolist())

    system, last_messages = tokens(150), {"first": tokens(20), "second": tokens(30)}
    last_messages["no cache"] = last_messages["second"]
    asked = {
        f"{kind} {name}": (
            name,
            Add(
                sequence_id=f"{kind} {name}",
                prompt=system + last_messages[kind],
                max_tokens=4,
                sampling=GREEDY,
                digest=None if name is None else subject.digests[name],
                isolation_key=b"" if kind == "no cache" else b"tenant",
            ),
        )
        for kind in KINDS
        for name in names
    }
    adds = [add for _, add in asked.values()]
    ends = finish(assembled, adds[: len(names)]) | finish(assembled, adds[len(names) :])
    assembled.adapters.close()
    for kind, num_cached in KINDS.items():
        assert [ends[one].cached_tokens for one in asked if one.startswith(kind)] == [num_cached] * len(names)
    return asked


def assert_the_cache_changes_no_logits(recorder: Recorder, name: str | None, tolerance: float) -> None:
    ours, theirs = (torch.stack(recorder.by_sequence[f"{kind} {name}"]) for kind in ("second", "no cache"))
    assert torch.equal(ours.argmax(1), theirs.argmax(1))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("path", ["cpu", *PATHS])
def test_prompts_that_start_from_a_state_equal_transformers_and_peft(
    subject: Subject, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU's path, steps are padded and submitted ahead."""
    backend = None if path == "cpu" else gpu_path(path, monkeypatch)
    assembled = subject.assemble(backend, max_batch_tokens=80)
    recorder = Recorder(assembled.engine, monkeypatch)
    names = (None, "r4", "r2") if path == "cpu" else (None, "r4")
    for sequence_id, (name, add) in ask_with_a_shared_prefix(subject, assembled, names).items():
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    for name in names:
        assert_the_cache_changes_no_logits(recorder, name, 1e-5)


def test_prompts_with_k_and_v_in_8_bits_start_from_a_state(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assembled = subject.assemble(max_batch_tokens=80, kv_dtype="int8")
    recorder = Recorder(assembled.engine, monkeypatch)
    ask_with_a_shared_prefix(subject, assembled, (None,))
    # A code may be rounded the other way if a step has other rows.
    assert_the_cache_changes_no_logits(recorder, None, 0.02)


def test_a_sequence_that_is_not_finite_ends_alone(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(subject.directory / "model.safetensors")
    # The head keeps its values, so that only rows with this token become NaN.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((subject.directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    poisoned = Subject(tmp_path, subject.reference, subject.digests, subject.adapters, subject.num_pages)
    assembled = poisoned.assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    asked = requests(subject, (4, 5, 9), max_tokens=4)
    name, add = asked["0"]
    asked["0"] = name, structs.replace(add, prompt=(5, POISON, 9))
    ends = run(assembled, [add for _, add in asked.values()])
    assert (ends["0"].code, ends["0"].completion_tokens) == ("not_finite", 0)
    for sequence_id in ("1", "2"):
        assert_parity(subject, *asked[sequence_id], recorder.by_sequence[sequence_id])


def test_a_pool_that_cannot_hold_a_state_is_refused(subject: Subject) -> None:
    geometry = ModelConfig.load(subject.directory).geometry(4, 4)
    with pytest.raises(PoolTooSmall, match=r"one sequence takes 1 pages, but .* has only 1: raise pool_bytes"):
        subject.assemble(pool_bytes=geometry.total_page_bytes)


CONTRADICTIONS: list[tuple[dict[str, object], str]] = [
    ({"layer_types": ["full_attention"] * 2}, r"no tensor model\.layers\.0\.self_attn\.q_norm\.weight"),
    ({"layer_types": ["full_attention", "linear_attention"]}, r"no tensor model\.layers\.0\.self_attn\.q_norm"),
    ({"linear_num_key_heads": 4}, r"conv1d\.weight has shape \[160, 1, 4\], but config\.json says \[256, 1, 4\]"),
    ({"linear_value_head_dim": 8}, r"conv1d\.weight has shape \[160, 1, 4\], but config\.json says \[128, 1, 4\]"),
    ({"linear_conv_kernel_dim": 3}, r"conv1d\.weight has shape \[160, 1, 4\], but config\.json says \[160, 1, 3\]"),
    ({"head_dim": 16}, r"self_attn\.q_norm\.weight has shape \[32\], but config\.json says \[16\]"),
]


@pytest.mark.parametrize(("fields", "message"), CONTRADICTIONS)
def test_files_that_contradict_the_configuration_are_refused(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    make_base("qwen3_5", tmp_path, SMALL_SHAPE)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ModelNotSupported, match=message):
        Subject(tmp_path, None, {}, {}, {}).assemble()


def test_tensors_that_predict_several_tokens_are_not_read(subject: Subject, tmp_path: Path) -> None:
    tensors = load_file(subject.directory / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((subject.directory / "config.json").read_bytes())
    Subject(tmp_path, None, {}, {}, {}).assemble().adapters.close()
    save_file({**tensors, "model.mtp.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotSupported, match=r"does not use, such as model\.mtp\.weight"):
        Subject(tmp_path, None, {}, {}, {}).assemble()
