"""The base's own head for drafts, against the published formula, and answers with its drafts against those without."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from loramux.engine.architectures.draft_head import DraftHeadNames
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.decoder.draft_head import DraftHead
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.drafting.step_times import StepTimes
from loramux.engine.loop.config import EngineConfig, check_host_page
from loramux.engine.loop.engine import Engine
from loramux.engine.protocol.errors import ConfigNotUsable, ModelNotSupported
from loramux.engine.protocol.messages import Add, Finished, SamplingParams, StatsRequest, StepOutput
from loramux.engine.sequences.batch import StepInputs
from tests.conformance.draft_heads import Tensors, add_head, head_tensors
from tests.conformance.parity import Subject, make_subject
from tests.conformance.test_drafts import NUM_REQUESTS, PLANS, Answer, check, drawn, run
from tests.conformance.test_gpu_engine import PATHS, gpu_path, plain_backend
from tests.conformance.tiny_models import SMALL_SHAPE, make_base

HIDDEN = SMALL_SHAPE["hidden_size"]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts do not depend on how long steps take on this machine: rows and the head count as free."""
    monkeypatch.setattr(StepTimes, "ratio", lambda times, num_rows, num_more: 1.0)
    monkeypatch.setattr(StepTimes, "seconds", lambda times, num_rows: 0.0)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate the two halves of each head. `x` is `[num_heads, num_tokens, head_dim]`."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def qwen2_layer(head: Tensors, x: torch.Tensor) -> torch.Tensor:
    """A Qwen 2 layer over the positions 0, 1, 2 and so on. `x` is `[num_tokens, hidden_size]`."""

    def linear(name: str, y: torch.Tensor) -> torch.Tensor:
        return functional.linear(y, head[f"{name}.weight"], head.get(f"{name}.bias"))

    num_heads, num_kv_heads = SMALL_SHAPE["num_attention_heads"], SMALL_SHAPE["num_key_value_heads"]
    head_dim = HIDDEN // num_heads
    y = rms_norm(x, head["input_layernorm.weight"])
    q, k, v = (linear(f"self_attn.{name}_proj", y).view(len(x), -1, head_dim).transpose(0, 1) for name in "qkv")
    q, k = rotated(q, 10000.0), rotated(k, 10000.0)
    k, v = (one.repeat_interleave(num_heads // num_kv_heads, dim=0) for one in (k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(head_dim)
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    x = x + linear("self_attn.o_proj", (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1))
    y = rms_norm(x, head["post_attention_layernorm.weight"])
    return x + linear("mlp.down_proj", functional.silu(linear("mlp.gate_proj", y)) * linear("mlp.up_proj", y))


def glm_layer(reference: Any, head: Tensors, x: torch.Tensor) -> torch.Tensor:
    """A layer with experts as in transformers."""
    model = reference.get_base_model().model
    layer = type(model.layers[-1])(model.config, len(model.layers) - 1).eval()
    experts = [head[f"mlp.experts.{i}.{part}_proj.weight"] for part in ("gate", "up") for i in range(8)]
    stacked = {
        "mlp.experts.gate_up_proj": torch.cat([torch.stack(experts[:8]), torch.stack(experts[8:])], dim=1),
        "mlp.experts.down_proj": torch.stack([head[f"mlp.experts.{i}.down_proj.weight"] for i in range(8)]),
    }
    layer.load_state_dict({name: stacked.get(name, head.get(name)) for name in layer.state_dict()})
    positions = torch.arange(len(x))[None]
    mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
    angles = model.rotary_emb(x[None], positions)
    found: torch.Tensor = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=angles)
    return found[0]


@torch.no_grad()
def expected_logits(
    subject: Subject, names: DraftHeadNames, tokens: list[int], adapter: str | None = None, head: Tensors | None = None
) -> torch.Tensor:
    """The logits of the head after each token except the last, by the formula in the technical report of DeepSeek-V3.

    MiMo's head reads the states before the base's final norm, and before the embeddings. `head` are its tensors, if
    they are not the base's.
    """
    head, model = head or head_tensors(subject.directory), subject.reference.get_base_model()
    with subject.reference.disable_adapter() if adapter is None else nullcontext():
        if adapter is not None:
            subject.reference.set_adapter(adapter)
        seen: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_hook(lambda norm, inputs, output: seen.extend((inputs[0], output)))
        model(input_ids=torch.tensor([tokens]))
        hook.remove()
        embedded = model.model.embed_tokens(torch.tensor(tokens[1:]))
        is_mimo, norm = names.state_first, partial(rms_norm, eps=model.config.rms_norm_eps)
        state = seen[0 if is_mimo else 1][0, :-1]
        parts = [
            norm(embedded, head[f"{names.embedding_norm}.weight"]),
            norm(state, head[f"{names.state_norm}.weight"]),
        ]
        x = functional.linear(torch.cat(parts[::-1] if is_mimo else parts, -1), head[f"{names.projection}.weight"])
        y = qwen2_layer(head, x) if is_mimo else glm_layer(subject.reference, head, x)
        logits: torch.Tensor = model.lm_head(norm(y, head[f"{names.final_norm}.weight"]))
        return logits


@pytest.mark.parametrize("num_scored", [None, 1], ids=["", "scored"])
@pytest.mark.parametrize("path", ["cpu", *PATHS])
@pytest.mark.parametrize("family", ["mimo", pytest.param("glm4_moe", marks=pytest.mark.campaign)])
def test_the_heads_logits_follow_the_published_formula(
    family: str, path: str, num_scored: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt takes three steps, which may also score it. The rest of the rows are decoded, some of them twice."""
    subject = make_subject(family, tmp_path, PLANS[:1], SMALL_SHAPE)
    names = add_head(subject.directory)
    compute, found = DraftHead.logits, list[tuple[int, int, int, torch.Tensor]]()

    def recording(
        head: DraftHead, inputs: StepInputs, states: torch.Tensor, next_tokens: torch.Tensor, *others: Any
    ) -> torch.Tensor:
        logits = compute(head, inputs, states, next_tokens, *others)
        rows = (inputs.positions.tolist(), inputs.tokens.tolist(), next_tokens.tolist(), logits)
        found.extend(zip(*rows, strict=True))
        return logits

    backend = None if path == "cpu" else gpu_path(path, monkeypatch)
    assembled = subject.assemble(backend, speculate="head", max_batch_tokens=16)
    monkeypatch.setattr(DraftHead, "logits", recording)
    prompt = tuple((7 * place) % 50 + 2 for place in range(40))
    sampling = msgspec.structs.replace(GREEDY, num_prompt_logprobs=num_scored)
    answer = answers_of(assembled.engine, [Add(sequence_id="a", prompt=prompt, max_tokens=20, sampling=sampling)])["a"]
    assembled.close()
    tokens = [*prompt, *answer.tokens]
    expected = expected_logits(subject, names, tokens)
    compared = set[int]()
    for position, token, next_token, logits in found:
        # The rows of rejected drafts have other tokens. Tokens in flight are negative.
        if [token, next_token] == tokens[position : position + 2]:
            torch.testing.assert_close(logits, expected[position], rtol=1e-4, atol=1e-4)
            compared.add(position)
    assert len(compared) >= 10


def answers_of(engine: Engine, adds: Sequence[Add]) -> dict[str, Answer]:
    answers = {add.sequence_id: Answer() for add in adds}
    for add in adds:
        engine.add(b"", add)
    while engine.has_work:
        engine.step()
    for outbound in engine.take_outbox():
        match outbound.message:
            case StepOutput(outputs=outputs):
                for output in outputs:
                    answers[output.sequence_id].tokens += output.token_ids
            case Finished() as end:
                answers[end.sequence_id].end = end
    return answers


def echo(tensors: Tensors) -> None:
    """Make the outputs of all blocks zero, so that the next token depends on the last one only."""
    for name, one in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            one.zero_()


def always_right(head: Tensors, factor: float = 1.0) -> None:
    """Make a head predict what such a base predicts after the next token."""
    echo(head)
    head["input_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), factor * torch.eye(HIDDEN)], dim=1)
    for name, one in head.items():
        if "norm" in name:
            one.fill_(1.0)


def not_finite(head: Tensors) -> None:
    head["mlp.down_proj.weight"].fill_(torch.nan)


HEADS: dict[str, Callable[[Tensors], None]] = {
    "right": always_right,
    "wrong": partial(always_right, factor=-1.0),
    "NaN": not_finite,
}


@pytest.fixture(scope="module")
def echoing(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A base whose answers without adapters follow from the last token. Adapters make the answers differ."""
    subject = make_subject("mimo", tmp_path_factory.mktemp("mimo"), PLANS, SMALL_SHAPE)
    path = subject.directory / "model.safetensors"
    tensors = load_file(path)
    echo(tensors)
    for name, one in tensors.items():
        if "norm" in name:
            one.fill_(1.0)
    save_file(tensors, path)
    return subject


@pytest.fixture(scope="module")
def plain_answers(echoing: Subject) -> dict[str, Answer]:
    return run(echoing, requests(echoing), None, "off", 60)[0]


def requests(subject: Subject) -> list[Add]:
    """Mixed requests of the base and adapters. Every other one is greedy, without penalties and of the base."""
    adds = [drawn(subject, number) for number in range(8)]
    steady = [
        Add(sequence_id=f"{100 + number}", prompt=(number + 2, number + 3), max_tokens=30, sampling=GREEDY)
        for number in range(4)
    ]
    return [*adds, *steady]


@pytest.mark.parametrize("name", HEADS)
def test_answers_are_the_same_with_drafts_of_the_head(
    name: str, echoing: Subject, plain_answers: dict[str, Answer], tmp_path: Path
) -> None:
    subject = with_head(echoing, tmp_path, HEADS[name])
    adds = requests(subject)
    found, drafts, _ = run(subject, adds, None, "head", 60)
    check(adds, found, plain_answers)
    assert drafts.text_tokens == drafts.prediction_tokens == 0
    match name:
        case "right":
            assert drafts.head_tokens > drafts.accepted_head_tokens > drafts.head_tokens / 4
        case "wrong":
            assert drafts.head_tokens > 20
            assert drafts.accepted_head_tokens < drafts.head_tokens / 4
        case _:
            assert drafts.head_tokens == 0


def test_answers_are_the_same_with_drafts_of_the_head_on_the_gpu_path(echoing: Subject, tmp_path: Path) -> None:
    """The stand-in for the GPU's sampling always takes the most likely token."""
    subject, backend = with_head(echoing, tmp_path, always_right), plain_backend(HostAccelerator())
    adds = requests(subject)[-2:]
    plain, _, _ = run(subject, adds, backend, "off", 60)
    found, drafts, _ = run(subject, adds, backend, "head", 60)
    check(adds, found, plain)
    assert drafts.head_tokens >= drafts.accepted_head_tokens > 20


@pytest.mark.campaign
@pytest.mark.parametrize("family", ["mimo", "glm4_moe"])
def test_many_answers_are_the_same_with_drafts_of_the_head(family: str, tmp_path: Path) -> None:
    subject = make_subject(family, tmp_path, PLANS, SMALL_SHAPE)
    adds = [drawn(subject, number) for number in range(NUM_REQUESTS)]
    plain, _, num_preemptions = run(subject, adds, None, "off", num_kv_pages=8)
    add_head(subject.directory)
    found, drafts, _ = run(subject, adds, None, "head", num_kv_pages=8)
    check(adds, found, plain)
    assert num_preemptions > 0
    assert drafts.head_tokens > NUM_REQUESTS


def with_head(subject: Subject, directory: Path, change: Callable[[Tensors], None]) -> Subject:
    """A copy of the base with a head."""
    for file in subject.directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    add_head(directory, change)
    return Subject(directory, subject.reference, subject.digests, subject.adapters, subject.num_pages)


def test_a_right_head_halves_the_steps_of_a_request(echoing: Subject, tmp_path: Path) -> None:
    subject = with_head(echoing, tmp_path, always_right)
    add = Add(sequence_id="a", prompt=(5, 6, 7), max_tokens=41, sampling=GREEDY)
    plain, _ = steps_of(subject, add, "off")
    # The step with the prompt and the first decode step have no drafts.
    assert steps_of(subject, add, "head") == (plain, 22)
    assert steps_of(subject, msgspec.structs.replace(add, speculates=False), "head") == (plain, 41)


def test_steps_without_drafts_count_the_time_in_which_the_head_stores(echoing: Subject, tmp_path: Path) -> None:
    assembled = with_head(echoing, tmp_path, always_right).assemble(speculate="head")
    answers_of(
        assembled.engine, [Add(sequence_id="a", prompt=(5, 6, 7), max_tokens=9, sampling=GREEDY, speculates=False)]
    )
    drafts = assembled.engine.stats(StatsRequest(call_id="")).drafts
    assembled.close()
    assert drafts.head_tokens == 0
    assert drafts.head_s > 0


def steps_of(subject: Subject, add: Add, speculate: str, **settings: Any) -> tuple[list[int], int]:
    """The answer to a request, and the number of steps that it took."""
    assembled = subject.assemble(speculate=speculate, **settings)
    try:
        answer = answers_of(assembled.engine, [add])[add.sequence_id]
        return answer.tokens, assembled.engine.stats(StatsRequest(call_id="")).num_steps
    finally:
        assembled.close()


def test_a_cached_prefix_has_the_heads_keys_and_values(echoing: Subject, tmp_path: Path) -> None:
    """A request that begins with cached pages reads none that the head has not written, which would be NaN."""
    subject = with_head(echoing, tmp_path, lambda head: None)
    assembled = subject.assemble(speculate="head")
    assert assembled.head_views is not None
    assert len(assembled.head_views.raw) == len(assembled.views.raw)
    check_page(subject, assembled.views.raw[0].nbytes + assembled.head_views.raw[0].nbytes)
    assembled.head_views.raw.fill_(0xFF)
    prompt = tuple(range(2, 60))
    adds = [Add(sequence_id=f"{i}", prompt=prompt, max_tokens=9, sampling=GREEDY, isolation_key=b"x") for i in range(2)]
    ends, drafted = [], []
    for add in adds:
        ends.append(answers_of(assembled.engine, [add])[add.sequence_id].end)
        drafted.append(assembled.engine._speculation.counts().head_tokens)
    assembled.close()
    assert ends[1] is not None
    assert ends[1].cached_tokens == 48
    assert drafted[1] > drafted[0] > 0


def check_page(subject: Subject, page_bytes: int) -> None:
    """Check that this is the least size of the host memory for evicted pages."""
    model = ModelConfig.load(subject.directory)
    config = EngineConfig(model_dir="", blob_url="", cache_dir="", dtype="float32", speculate="head")
    check_host_page(msgspec.structs.replace(config, kv_host_bytes=page_bytes), model)
    # It may draft from the text only, whose pages are smaller.
    check_host_page(msgspec.structs.replace(config, kv_host_bytes=page_bytes - 1, speculate="auto"), model)
    with pytest.raises(ConfigNotUsable, match=f"set it to at least {page_bytes}, or to 0"):
        check_host_page(msgspec.structs.replace(config, kv_host_bytes=page_bytes - 1), model)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("input_proj.weight", (HIDDEN, HIDDEN), r"mtp_layers\.0\.input_proj\.weight has shape \[128, 128\]"),
        ("mlp.up_proj.weight", (8, HIDDEN), r"mtp_layers\.0\.mlp\.up_proj\.weight has shape \[8, 128\]"),
        ("final_layernorm.weight", None, r"no tensor model\.mtp_layers\.0\.final_layernorm\.weight"),
    ],
)
def test_a_head_that_does_not_fit_the_base_is_refused(
    name: str,
    shape: tuple[int, ...] | None,
    message: str,
    echoing: Subject,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def change(head: Tensors) -> None:
        del head[name]
        if shape is not None:
            head[name] = torch.zeros(shape)

    subject = with_head(echoing, tmp_path, change)
    with pytest.raises(ModelNotSupported, match=message):
        subject.assemble(speculate="head")
    # A base whose head is not used is served.
    subject.assemble(speculate="off").close()
    assembled = subject.assemble(speculate="auto")
    assembled.close()
    assert assembled.ready.guesses == "text"
    assert re.search(f"drafts from the text.*{message}", capfd.readouterr().err)


def test_a_hybrid_base_is_refused_by_name(tmp_path: Path) -> None:
    make_base("qwen3_5", tmp_path, SMALL_SHAPE)
    subject = Subject(tmp_path, None, {}, {}, {})
    with pytest.raises(ConfigNotUsable, match=r"Qwen3_5ForCausalLM has layers with a recurrent state, and the head"):
        subject.assemble(speculate="head")


def test_a_head_that_could_not_draft_on_a_gpu_is_not_loaded(echoing: Subject, tmp_path: Path) -> None:
    """A GPU samples as many rows per step as sequences can run, and a draft takes a second row."""
    subject, backend = with_head(echoing, tmp_path, lambda head: None), plain_backend(HostAccelerator())
    with pytest.raises(ConfigNotUsable, match="a draft needs a second row in a step, but max_sequences on a GPU"):
        subject.assemble(backend, speculate="head", max_sequences=1)
    assembled = subject.assemble(backend, speculate="auto", max_sequences=1)
    assembled.close()
    assert assembled.head_views is None


def test_workers_do_not_divide_a_head(echoing: Subject, tmp_path: Path) -> None:
    subject = with_head(echoing, tmp_path, lambda head: None)
    with pytest.raises(ConfigNotUsable, match="cannot divide the base's head for drafts: use --speculate text or auto"):
        subject.assemble(speculate="head", tensor_parallel_size=2, num_threads=2)


def test_the_heads_keys_and_values_can_be_codes(echoing: Subject, tmp_path: Path) -> None:
    """The base's attention adds nothing, and the answers are those of its last tokens."""
    subject = with_head(echoing, tmp_path, always_right)
    add = Add(sequence_id="a", prompt=(5, 6, 7), max_tokens=41, sampling=GREEDY)
    plain, _ = steps_of(subject, add, "off")
    assert steps_of(subject, add, "head", kv_dtype="int8") == (plain, 22)


def test_without_a_head_auto_reads_the_text_and_head_is_refused(echoing: Subject, tmp_path: Path) -> None:
    assembled = echoing.assemble(speculate="auto")
    assembled.close()
    assert assembled.ready.guesses == "text"
    assert assembled.head_views is None
    with pytest.raises(ConfigNotUsable, match=r"config\.json names no head .* MiMoForCausalLM: use --speculate text"):
        echoing.assemble(speculate="head")
    subject = with_head(echoing, tmp_path, lambda head: None)
    assembled = subject.assemble(speculate="auto")
    assembled.close()
    assert assembled.ready.guesses == "head"
    (tmp_path / "model.safetensors").write_bytes((echoing.directory / "model.safetensors").read_bytes())
    with pytest.raises(ConfigNotUsable, match=r"the model's files have no tensor of its head .* model\.mtp_layers\.0"):
        subject.assemble(speculate="head")
