"""Choosing tokens on the device: what the host hears later is what its own sampler would have said."""

from __future__ import annotations

import pytest
import torch

from loramux.engine.accelerator import Fence, HostAccelerator
from loramux.engine.backend import Backend
from loramux.engine.device_sampler import DeviceSampler
from loramux.engine.messages import SamplingParams
from loramux.engine.sampler import SampledToken, SamplingRow, sample, uniforms_of
from loramux.engine.step_buffer import SamplingInputs
from tests.engine.gpu_backend import gpu_backend
from tests.kernels.interpreted import DEVICE, HAS_GPU

VOCAB_SIZE, MAX_SAMPLES, EOS = 70, 8, (3,)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    return gpu_backend(monkeypatch)


@pytest.fixture
def sampler(backend: Backend) -> DeviceSampler:
    assert backend.sample_tokens is not None
    return DeviceSampler(backend.accelerator, backend.sample_tokens, MAX_SAMPLES, EOS)


def rows_of(*params: SamplingParams, num_chosen: int = 0) -> list[SamplingRow]:
    return [SamplingRow(one, seed, num_chosen) for seed, one in enumerate(params)]


def inputs_of(rows: list[SamplingRow]) -> SamplingInputs:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        # A step's columns are padded; what lies there means nothing.
        return torch.tensor([*values, *[0] * (MAX_SAMPLES - len(values))], dtype=dtype, device=DEVICE)

    params = [row.params for row in rows]
    return SamplingInputs(
        temperature=column([one.temperature for one in params], torch.float32),
        top_k=column([one.top_k for one in params], torch.int32),
        top_p=column([one.top_p for one in params], torch.float32),
        min_p=column([0.0 for _ in params], torch.float32),
        uniform=column(uniforms_of(rows).tolist(), torch.float32),
    )


def choose(sampler: DeviceSampler, logits: torch.Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    return sampler.choose(logits.clone().to(DEVICE), rows, inputs_of(rows)).tokens()


def random_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(num_rows))


def test_greedy_rows_and_log_probabilities_equal_the_hosts(sampler: DeviceSampler) -> None:
    rows = rows_of(
        GREEDY,
        SamplingParams(temperature=0.0, num_logprobs=0),
        SamplingParams(temperature=0.0, num_logprobs=3),
        SamplingParams(temperature=0.0, num_logprobs=VOCAB_SIZE + 5),
    )
    logits = random_logits(4)
    for found, expected in zip(choose(sampler, logits, rows), sample(logits, rows, EOS), strict=True):
        assert found.token_id == expected.token_id
        assert (found.logprobs is None) == (expected.logprobs is None)
        if found.logprobs is not None and expected.logprobs is not None:
            assert found.logprobs.token_id == expected.logprobs.token_id
            assert found.logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=1e-5)
            assert [token for token, _ in found.logprobs.top] == [token for token, _ in expected.logprobs.top]
            assert [value for _, value in found.logprobs.top] == pytest.approx(
                [value for _, value in expected.logprobs.top], abs=1e-5
            )


def test_log_probabilities_are_the_models_whatever_is_forbidden_or_cut(sampler: DeviceSampler) -> None:
    rows = rows_of(SamplingParams(temperature=0.7, top_k=2, min_tokens=1, num_logprobs=2, seed=1))
    logits = random_logits(1)
    logits[0, EOS[0]] = 9.0
    (found,) = choose(sampler, logits, rows)
    assert found.logprobs is not None
    expected = torch.log_softmax(logits[0], 0)
    assert found.logprobs.top[0] == (EOS[0], pytest.approx(float(expected[EOS[0]]), abs=1e-5))
    assert found.token_id != EOS[0]
    assert found.logprobs.logprob == pytest.approx(float(expected[found.token_id]), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_ends_a_sequence_before_its_minimum(sampler: DeviceSampler, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=2, stop_token_ids=(5, 6), seed=0)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [3, 5, 6]] = 50.0
    logits[0, 8] = 20.0
    assert choose(sampler, logits, rows_of(params, num_chosen=1))[0].token_id == 8
    assert choose(sampler, logits, rows_of(params, num_chosen=2))[0].token_id in (3, 5, 6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(min_tokens=4, num_logprobs=1)], ids=["greedy", "short"])
def test_a_row_that_is_not_finite_has_no_token_and_harms_no_other(
    sampler: DeviceSampler, params: SamplingParams, value: float
) -> None:
    logits = random_logits(3)
    logits[1, EOS[0]] = value
    tokens = choose(sampler, logits, rows_of(GREEDY, params, GREEDY))
    assert tokens[1].token_id is None
    assert [tokens[row].token_id for row in (0, 2)] == logits[[0, 2]].argmax(1).tolist()


def test_the_next_step_finds_the_tokens_in_the_place_of_negative_ones(sampler: DeviceSampler) -> None:
    logits = random_logits(4)
    logits[2] = torch.nan
    chosen = [token.token_id for token in choose(sampler, logits, rows_of(*[GREEDY] * 4))]
    assert chosen[2] is None
    tokens = torch.tensor([7, -1, 0, -4, -3, -2], dtype=torch.int32, device=DEVICE)
    # The row without a token is given 0, whatever lies at the address that its number would be.
    assert sampler.resolve(tokens).tolist() == [7, chosen[0], 0, chosen[3], 0, chosen[1]]


def test_tokens_are_read_after_the_fence(backend: Backend) -> None:
    order: list[str] = []

    class LateFence:
        def wait(self) -> None:
            order.append("waited")

    class LateAccelerator(HostAccelerator):
        def fence(self) -> Fence:
            order.append("fenced")
            return LateFence()

        def download(self, tensor: torch.Tensor) -> torch.Tensor:
            order.append("downloaded")
            return tensor.clone()

    assert backend.sample_tokens is not None
    if HAS_GPU:
        pytest.skip("the order is that of the calls, seen on the host")
    sampler = DeviceSampler(LateAccelerator(), backend.sample_tokens, MAX_SAMPLES, EOS)
    rows = rows_of(SamplingParams(temperature=0.0, num_logprobs=1))
    step = sampler.choose(random_logits(1), rows, inputs_of(rows))
    assert order == ["downloaded"] * 4 + ["fenced"]
    step.tokens()
    assert order[-1] == "waited"
