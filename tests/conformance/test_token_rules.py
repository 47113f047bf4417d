from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from msgspec import structs

from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend
from loramux.engine.protocol.messages import Add, Finished, SamplingParams, StepOutput, ThinkingBudget, TokenLogprobs
from tests.conformance.parity import Subject, make_subject
from tests.conformance.test_gpu_engine import plain_backend
from tests.conformance.tiny_models import ALL_LINEARS, SMALL_SHAPE, SMALL_WINDOW, VOCAB_SIZE, AdapterPlan
from tests.engine.device.gpu_backend import gpu_backend

NUM_TOKENS = 12
ODD = tuple(range(1, VOCAB_SIZE, 2))
RULES: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": ODD},
    "thinking": {"thinking": ThinkingBudget(num_tokens=5, begin=(2, 3), end=(4, 5, 6), is_open=True)},
    "bad_words": {"bad_words": tuple((token,) for token in range(0, VOCAB_SIZE, 3))[:128]},
}

Results = tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]]]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    plans = [AdapterPlan("r3", 3, ALL_LINEARS, alpha=6.0)]
    return make_subject("llama", tmp_path_factory.mktemp("llama"), plans, SMALL_SHAPE, SMALL_WINDOW)


@pytest.fixture(params=["cpu", "gpu without kernels", pytest.param("gpu", marks=pytest.mark.campaign)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend | None:
    match request.param:
        case "cpu":
            return None
        case "gpu":
            return gpu_backend(monkeypatch)
    return plain_backend(HostAccelerator())


def request_of(subject: Subject, index: int, **rules: Any) -> Add:
    """Every other request samples, and every third uses the base."""
    sampling = SamplingParams(
        temperature=float(index % 2), seed=index, ignore_eos=True, num_logprobs=2, repetition_penalty=1.1
    )
    return Add(
        sequence_id=str(index),
        prompt=tuple(2 + (index * 7 + place) % (VOCAB_SIZE - 2) for place in range(5 + index)),
        max_tokens=NUM_TOKENS,
        sampling=structs.replace(sampling, **rules),
        digest=None if index % 3 else subject.digests["r3"],
    )


def run(subject: Subject, backend: Backend | None, adds: list[Add]) -> Results:
    assembled = subject.assemble(backend)
    tokens: dict[str, list[int]] = defaultdict(list)
    logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
    for add in adds:
        assembled.engine.add(b"", add)
    while assembled.engine.has_work:
        assembled.engine.step()
        for outbound in assembled.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        tokens[output.sequence_id] += output.token_ids
                        logprobs[output.sequence_id] += output.logprobs
                case Finished(reason=reason):
                    assert reason == "length", outbound.message
    assembled.engine.check_integrity()
    assembled.adapters.close()
    return tokens, logprobs


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_rules_hold_and_change_no_other_row(subject: Subject, backend: Backend | None, rules: dict[str, Any]) -> None:
    ruled = [request_of(subject, index, **rules) for index in range(4)]
    free = [request_of(subject, index) for index in range(4, 8)]
    tokens, logprobs = run(subject, backend, [*ruled, *free])
    # Run the same batch without rules. Only the rows with rules may differ.
    plain = run(subject, backend, [request_of(subject, index) for index in range(8)])
    for one in free:
        name = one.sequence_id
        assert (tokens[name], logprobs[name]) == (plain[0][name], plain[1][name])
    for one in ruled:
        answer = tokens[one.sequence_id]
        assert len(answer) == NUM_TOKENS
        check(one, answer)
        assert answer != plain[0][one.sequence_id]
        if backend is None:
            # The CPU's kernels give each row the same bits in every batch.
            assert run(subject, backend, [one])[0][one.sequence_id] == answer


def check(add: Add, answer: list[int]) -> None:
    allowed = add.sampling.allowed_token_ids
    assert not allowed or set(answer) <= set(allowed)
    assert add.sampling.thinking is None or answer[5:8] == [4, 5, 6]
    assert not set(answer) & {word[0] for word in add.sampling.bad_words}
