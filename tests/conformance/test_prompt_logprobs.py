from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from msgspec import structs

from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend
from loramux.engine.protocol.messages import Add, Finished, PromptLogprob, SamplingParams, StepOutput, TokenLogprobs
from tests.conformance.parity import TOLERANCE, Subject, make_subject
from tests.conformance.tiny_models import ALL_LINEARS, SMALL_SHAPE, SMALL_WINDOW, VOCAB_SIZE, AdapterPlan
from tests.engine.device.gpu_backend import gpu_backend, plain_backend

PLANS = [
    AdapterPlan("r3", 3, ALL_LINEARS, alpha=6.0),
    AdapterPlan("both", 4, ["embed_tokens", "lm_head", "v_proj"], alpha=8.0),
]
PROMPTS = [(None, 1), ("r3", 5), (None, 33), ("both", 90), (None, 70), ("r3", 20)]
"""Adapter and prompt length of each request. Every other request is scored. A scored prompt exceeds SCORED_AT_ONCE."""

Results = tuple[
    dict[str, list[PromptLogprob]], dict[str, list[int]], dict[str, list[TokenLogprobs]], dict[str, Finished]
]


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3_5", marks=pytest.mark.campaign)])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param), PLANS, SMALL_SHAPE, SMALL_WINDOW)


@pytest.fixture(params=["cpu", "gpu without kernels", pytest.param("gpu", marks=pytest.mark.campaign)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend | None:
    match request.param:
        case "cpu":
            return None
        case "gpu":
            return gpu_backend(monkeypatch)
    return plain_backend(HostAccelerator())


def requests(subject: Subject, is_scoring: bool) -> list[tuple[str | None, Add]]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for index, (name, length) in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, num_logprobs=3)
        if is_scoring and index % 2:
            sampling = structs.replace(sampling, num_prompt_logprobs=index % 4)
        prompt = tuple(torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist())
        digest = None if name is None else subject.digests[name]
        made.append((name, Add(sequence_id=str(index), prompt=prompt, max_tokens=3, sampling=sampling, digest=digest)))
    return made


def run(subject: Subject, backend: Backend | None, adds: list[tuple[str | None, Add]], **settings: Any) -> Results:
    assembled = subject.assemble(backend, **settings)
    scores: dict[str, list[PromptLogprob]] = defaultdict(list)
    tokens: dict[str, list[int]] = defaultdict(list)
    logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
    ends: dict[str, Finished] = {}
    for _, add in adds:
        assembled.engine.add(b"", add)
    while assembled.engine.has_work:
        assembled.engine.step()
        for outbound in assembled.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        scores[output.sequence_id] += output.prompt_logprobs
                        tokens[output.sequence_id] += output.token_ids
                        logprobs[output.sequence_id] += output.logprobs
                case Finished(sequence_id=sequence_id):
                    assert outbound.message.reason in ("length", "stop"), outbound.message
                    ends[sequence_id] = outbound.message
    assembled.engine.check_integrity()
    assembled.adapters.close()
    return scores, tokens, logprobs, ends


@pytest.mark.parametrize("step_tokens", [24, 256], ids=["chunks", "whole prompts"])
def test_scores_equal_transformers_and_peft_and_change_nothing_else(
    subject: Subject, backend: Backend | None, step_tokens: int
) -> None:
    scoring = requests(subject, is_scoring=True)
    scores, tokens, logprobs, _ = run(subject, backend, scoring, max_batch_tokens=step_tokens)
    plain = run(subject, backend, requests(subject, is_scoring=False), max_batch_tokens=step_tokens)
    assert (tokens, logprobs) == plain[1:3]
    num_scored = 0
    for name, add in scoring:
        count, scored = add.sampling.num_prompt_logprobs, scores[add.sequence_id]
        if count is None:
            assert not scored
            continue
        logits = subject.reference_logits(name, list(add.prompt))[:-1]
        limit = TOLERANCE * logits.abs().max()
        assert [one.token_id for one in scored] == list(add.prompt[1:])
        for one, row in zip(scored, torch.log_softmax(logits, dim=1), strict=True):
            assert abs(one.logprob - row[one.token_id]) <= 2 * limit
            low, high = ((row > row[one.token_id] + slack).sum() + 1 for slack in (2 * limit, -2 * limit))
            assert low <= one.rank <= high
            best = row.topk(count).values
            torch.testing.assert_close(torch.tensor([value for _, value in one.top]), best, atol=2 * limit, rtol=0)
            assert all(abs(value - row[token_id]) <= 2 * limit for token_id, value in one.top)
            num_scored += 1
    assert num_scored == 4 + 89 + 19


def test_the_token_that_ends_a_sequence_is_scored_like_the_others(subject: Subject, backend: Backend | None) -> None:
    asked = requests(subject, is_scoring=False)
    _, tokens, logprobs, ends = run(subject, backend, asked)
    assert all(end.stop_logprobs is None for end in ends.values())
    stopping = [
        (
            name,
            structs.replace(
                add,
                sampling=structs.replace(add.sampling, stop_token_ids=(tokens[add.sequence_id][-1],)),
                tokens_at_once=1 + index % 3,
            ),
        )
        for index, (name, add) in enumerate(asked)
    ]
    _, _, before, stopped = run(subject, backend, stopping)
    for _, add in stopping:
        expected, end = logprobs[add.sequence_id], stopped[add.sequence_id]
        assert end.reason == "stop"
        assert end.stop_logprobs is not None
        # The token can occur before its place in the whole answer.
        assert [*before[add.sequence_id], end.stop_logprobs] == expected[: end.completion_tokens]
        assert end.stop_logprobs.token_id == end.stop_token_id == tokens[add.sequence_id][-1]


def test_named_tokens_are_scored_in_place_of_the_likeliest(subject: Subject, backend: Backend | None) -> None:
    asked = requests(subject, is_scoring=False)
    _, tokens, logprobs, _ = run(subject, backend, asked)
    named = {"0": (5, 9, 2), "2": (7,), "3": tuple(range(VOCAB_SIZE - 8, VOCAB_SIZE))}
    naming = [
        (
            name,
            structs.replace(
                add, sampling=structs.replace(add.sampling, logprob_token_ids=named.get(add.sequence_id, ()))
            ),
        )
        for name, add in asked
    ]
    _, same, found, _ = run(subject, backend, naming)
    assert same == tokens
    for name, add in naming:
        ids = named.get(add.sequence_id)
        if ids is None:
            assert found[add.sequence_id] == logprobs[add.sequence_id]
            continue
        logits = subject.reference_logits(name, [*add.prompt, *tokens[add.sequence_id]])[len(add.prompt) - 1 : -1]
        limit = TOLERANCE * logits.abs().max()
        for one, row in zip(found[add.sequence_id], torch.log_softmax(logits, dim=1), strict=True):
            assert [token_id for token_id, _ in one.top] == list(dict.fromkeys((one.token_id, *ids)))
            assert one.top[0] == (one.token_id, one.logprob)
            assert all(abs(value - row[token_id]) <= 2 * limit for token_id, value in one.top)
