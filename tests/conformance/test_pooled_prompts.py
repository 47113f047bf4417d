from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend
from loramux.engine.protocol.messages import POOLINGS, Add, Finished, SamplingParams, StepOutput
from tests.conformance.parity import Subject, make_subject
from tests.conformance.test_gpu_engine import plain_backend
from tests.conformance.tiny_models import ALL_LINEARS, SMALL_SHAPE, SMALL_WINDOW, VOCAB_SIZE, AdapterPlan
from tests.engine.device.gpu_backend import gpu_backend

TOLERANCE = 1e-5
"""Largest difference of two unit vectors in one element."""
PLANS = [
    AdapterPlan("r1", 1, ["v_proj"], alpha=2.0),
    AdapterPlan("r8", 8, ALL_LINEARS, alpha=8.0, use_dora=True),
    AdapterPlan("r64", 64, ["q_proj", "o_proj"], alpha=32.0),
]
PROMPTS = [(None, 1), ("r64", 2), ("r1", 5), (None, 90), ("r8", 33), ("r64", 70), ("r1", 41)]
"""Adapter and length of each prompt. The longer ones exceed a step and, in gemma3, the window."""
STEP_TOKENS = {"chunks": 24, "whole prompts": 256}
QUICK = {
    ("llama", "cpu", "whole prompts"),
    ("llama", "gpu without kernels", "chunks"),
    ("gemma3", "cpu", "chunks"),
}
"""The cases of every test run. Together they have whole and divided prompts, a window, and padded steps."""
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.campaign)
    for case in product(("llama", "qwen3", "gemma3"), ("cpu", "gpu without kernels", "gpu"), STEP_TOKENS)
]


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param), PLANS, SMALL_SHAPE, SMALL_WINDOW)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend | None:
    match request.param:
        case "cpu":
            return None
        case "gpu":
            return gpu_backend(monkeypatch)
    return plain_backend(HostAccelerator())


def requests(subject: Subject) -> list[tuple[str | None, Add]]:
    """Each prompt with each pooling, and as the beginning of an answer."""
    generator = torch.Generator().manual_seed(5)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    made = []
    for index, (name, length) in enumerate(PROMPTS):
        prompt = tuple(torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist())
        digest = None if name is None else subject.digests[name]
        for pooling in (*POOLINGS, None):
            add = Add(
                sequence_id=f"{index} {pooling}",
                prompt=prompt,
                max_tokens=3 if pooling is None else 0,
                sampling=sampling,
                digest=digest,
                pooling=pooling,
            )
            made.append((name, add))
    return made


def run(
    subject: Subject, backend: Backend | None, adds: list[Add], **settings: Any
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, ...]]]:
    assembled = subject.assemble(backend, **settings)
    states: dict[str, torch.Tensor] = {}
    tokens: dict[str, tuple[int, ...]] = {}
    for add in adds:
        assembled.engine.add(b"", add)
    while assembled.engine.has_work:
        assembled.engine.step()
        for outbound in assembled.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        if output.pooled:
                            assert output.sequence_id not in states
                            states[output.sequence_id] = torch.from_numpy(np.frombuffer(output.pooled, "<f4").copy())
                        tokens[output.sequence_id] = tokens.get(output.sequence_id, ()) + output.token_ids
                case Finished() as end:
                    assert end.reason in ("stop", "length"), end
    assembled.engine.check_integrity()
    assembled.adapters.close()
    return states, tokens


@torch.no_grad()
def reference_states(subject: Subject, name: str | None, prompt: tuple[int, ...]) -> torch.Tensor:
    """The states after the final norm, float32 `[len(prompt), hidden_size]`."""
    seen: list[torch.Tensor] = []
    head = subject.reference.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        subject.reference_logits(name, list(prompt))
    finally:
        hook.remove()
    return seen[0][0]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("subject", "backend", "steps"), CASES, indirect=["subject", "backend"])
def test_pooled_states_equal_transformers_and_peft_and_change_no_answer(
    subject: Subject, backend: Backend | None, steps: str
) -> None:
    asked, num_tokens = requests(subject), STEP_TOKENS[steps]
    states, tokens = run(subject, backend, [add for _, add in asked], max_batch_tokens=num_tokens)
    plain = [add for _, add in asked if add.pooling is None]
    assert {one.sequence_id: tokens[one.sequence_id] for one in plain} == run(
        subject, backend, plain, max_batch_tokens=num_tokens
    )[1]
    for name, add in asked:
        if add.pooling is None:
            continue
        hidden = reference_states(subject, name, add.prompt)
        expected = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(dim=0)}[add.pooling]
        found = states[add.sequence_id]
        torch.testing.assert_close(found / found.norm(), expected / expected.norm(), atol=TOLERANCE, rtol=0)
        assert float(found.norm()) == pytest.approx(float(expected.norm()), rel=TOLERANCE)
