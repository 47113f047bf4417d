"""Compare sampling with its float64 definition at extreme settings.

Each row is sampled at evenly spaced numbers in [0, 1), so a token's frequency equals its probability.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from loramux.engine.constraints.logit_penalties import LARGEST, logit_penalties
from loramux.engine.execution import sampler as host_sampler
from loramux.engine.execution.device_sampler import DeviceSampler
from loramux.engine.execution.sampler import NUM_LIKELIEST, SampledToken, sample, used_temperature
from loramux.engine.execution.step_buffer import SamplingInputs
from loramux.engine.protocol.messages import SamplingParams
from loramux.engine.scheduling.request_limits import sampling_problem
from loramux.engine.sequences.batch import SamplingRow
from tests.engine.device.gpu_backend import gpu_backend
from tests.kernels.gpu.interpreted import DEVICE

NUM_EXAMPLES = int(os.environ.get("LORAMUX_SAMPLING_EXAMPLES", "3000"))
"""Number of host examples in the campaign. The device runs a twentieth of this number."""

Floats = npt.NDArray[np.float64]
LEAST_FLOAT32 = float(np.float32(1e-45))
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
EDGE = 1e-4
"""Upper bound on the relative error of float32 sums."""

TEMPERATURES = [5e-324, 1e-320, 1e-45, 1e-40, 1e-38, 1e-30, 1e-10, 0.01, 1.0, 2.0, 1e6, LARGEST_FLOAT32, 1e300]
SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, *TEMPERATURES]),
    top_p=st.sampled_from([1.0, 1.0, 1 - 2**-24, 1 - 2**-53, 0.9, 0.5, 1e-10, 1e-40, 5e-324, 0.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 63, 64, 65, 1024, 1025, 2**31 - 1]),
    min_p=st.sampled_from([0.0, 0.0, 5e-324, 1e-45, 1e-40, 1e-10, 0.05, 1 - 2**-24, 1.0]),
)


def normal(random: np.random.Generator, size: int) -> Floats:
    return random.normal(size=size) * 3


KINDS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "normal": normal,
    "near": lambda random, size: 1e4 + random.integers(0, 4, size) * 2.0**-10,  # type: ignore[return-value]
    "far": lambda random, size: normal(random, size) * 1e30,
    "ends": lambda random, size: random.choice([-LARGEST_FLOAT32, 0.0, LARGEST_FLOAT32], size),
    "highest": lambda random, size: np.full(size, LARGEST_FLOAT32),
    "ties": lambda random, size: random.integers(-2, 1, size).astype(float),
    "zeros": lambda random, size: random.choice([-0.0, 0.0], size),
    "denormal": lambda random, size: random.integers(-9, 9, size) * LEAST_FLOAT32,  # type: ignore[return-value]
    "least normal": lambda random, size: random.choice([-1.2e-38, 0.0, 1.2e-38], size),
}
LOGITS = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 2**31), st.sampled_from([1, 2, 3, 17, 64, 70]))


def make(kind: str, seed: int, size: int) -> torch.Tensor:
    return torch.tensor(KINDS[kind](np.random.default_rng(seed), size), dtype=torch.float32)


@dataclass(frozen=True)
class Definition:
    """The exact token distribution for a row with these float32 logits and settings, computed in float64."""

    logits: Floats
    params: SamplingParams
    keeps_ties: bool
    """True if all tokens tied with the last token inside top_k or top_p are kept, as on the device."""

    def shares(self, slack: float = 0.0) -> Floats:
        """The probability of each distinct logit, largest logit first. With positive `slack`, top_p and min_p keep more
        tokens.
        """
        distances = self.distances
        if self.params.temperature == 0:
            return (np.arange(len(distances)) == 0).astype(float)
        values, counts = np.unique(distances, return_counts=True)
        with np.errstate(over="ignore"):
            weights = np.exp(-values / used_temperature(self.params.temperature))
        among_k = np.clip((self.params.top_k or len(distances)) - (counts.cumsum() - counts), 0, counts)
        total = float((weights * (np.where(among_k > 0, counts, 0) if self.keeps_ties else among_k)).sum())
        nearer, kept = 0, np.zeros(len(values))
        for place, (weight, count) in enumerate(zip(weights, counts, strict=True)):
            limit = self.params.top_k or len(distances)
            most = min(count, max(0, limit - nearer))
            mass = float((weights * counts)[:place].sum()) / total
            top_p = self.params.top_p * (1 + slack)
            if top_p < 1:
                # Keep only the tied tokens that are needed to reach top_p.
                most = min(most, math.ceil(min(max(0.0, (top_p - mass) * total / max(weight, 1e-300)), most)))
            if weight < self.params.min_p * (1 - slack):
                most = 0
            if place == 0:
                most = max(most, 1)
            kept[place] = weight * (count if most and self.keeps_ties else most)
            nearer += int(count)
        return np.asarray(kept / kept.sum())

    @property
    def distances(self) -> Floats:
        return np.asarray(self.logits.max() - self.logits)

    def check(self, found: Sequence[SampledToken]) -> None:
        tokens = [one.token_id for one in found]
        assert None not in tokens, "a finite row has a token"
        values, place = np.unique(self.distances, return_inverse=True)
        drawn = np.bincount(place[np.array(tokens, dtype=int)], minlength=len(values)) / len(tokens)
        if self.params.temperature == 0:
            assert set(tokens) == {int(self.logits.argmax())}
            return
        wide, narrow, exact = self.shares(EDGE), self.shares(-EDGE), self.shares()
        assert not drawn[wide == 0].any(), "excluded tokens are never drawn"
        # A value covers only a few intervals of [0, 1), and each count can be off by one. Larger differences must come
        # from rounding at a threshold.
        unsure = np.abs(wide - narrow).sum() + 20 * EDGE
        pieces = np.bincount(place, minlength=len(values)) + 1
        assert (np.abs(drawn - exact) <= pieces / len(tokens) + unsure).all()


def even(count: int) -> npt.NDArray[np.float32]:
    """Evenly spaced numbers in [0, 1), including 0 and the largest float32 below 1."""
    numbers = (np.arange(count) + 0.5) / count
    numbers[0], numbers[-1] = 0.0, 1 - 2.0**-24
    return numbers.astype(np.float32)


def drawn_by_host(logits: torch.Tensor, params: SamplingParams, count: int) -> list[SampledToken]:
    rows = [SamplingRow(params, seed, 0) for seed in range(count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_sampler, "uniforms_of", lambda samples: even(len(samples)))
        return sample(logits.expand(count, -1), rows, ())


def drawn_by_device(
    device: DeviceSampler, logits: torch.Tensor, params: SamplingParams, count: int
) -> list[SampledToken]:
    def column(value: float) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.float32, device=DEVICE)

    inputs = SamplingInputs(
        temperature=column(used_temperature(params.temperature)),
        top_k=torch.full((count,), params.top_k, dtype=torch.int32, device=DEVICE),
        top_p=column(params.top_p),
        min_p=column(params.min_p),
        uniform=torch.from_numpy(even(count)).to(DEVICE),
    )
    rows = [SamplingRow(params, seed, 0) for seed in range(count)]
    return device.choose(logits.repeat(count, 1).to(DEVICE), rows, inputs).tokens()


def check_host(shape: tuple[str, int, int], params: SamplingParams) -> None:
    logits = make(*shape)
    assert sampling_problem(params, len(logits)) is None
    found = drawn_by_host(logits, params, 256)
    Definition(logits.double().numpy(), params, keeps_ties=False).check(found)


HOST = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@HOST
@example(("normal", 0, 70), SamplingParams(temperature=5e-324))
@example(("normal", 0, 70), SamplingParams(temperature=1e-46, top_k=5))
@example(("normal", 0, 70), SamplingParams(temperature=1e300))
@example(("ties", 0, 70), SamplingParams(temperature=5e-324))
@example(("highest", 0, 64), SamplingParams())
@example(("ends", 0, 64), SamplingParams(temperature=1e300, top_p=0.9))
@given(LOGITS, SETTINGS)
def test_host_follows_the_definition(shape: tuple[str, int, int], params: SamplingParams) -> None:
    check_host(shape, params)


@pytest.mark.parametrize("params", [SamplingParams(top_p=1 - 2**-24), SamplingParams(min_p=5e-324, top_k=2**31 - 1)])
def test_host_follows_the_definition_beyond_the_top_candidates(params: SamplingParams) -> None:
    for kind in sorted(KINDS):
        check_host((kind, 1, NUM_LIKELIEST + 1), params)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DeviceSampler:
    backend = gpu_backend(monkeypatch)
    assert backend.sample_tokens is not None
    for name, size in (("GROUP", 16), ("GROUPS_PER_PROGRAM", 8), ("BLOCK", 64), ("MAX_CANDIDATES", 64)):
        # Small tiles, as in the kernel's own tests, because the interpreter is slow.
        monkeypatch.setitem(backend.sample_tokens.__globals__, name, size)  # type: ignore[attr-defined]
    return DeviceSampler(backend.accelerator, backend.sample_tokens, 32, ())


def check_device(device: DeviceSampler, shape: tuple[str, int, int], params: SamplingParams, count: int) -> None:
    logits = make(*shape)
    found = drawn_by_device(device, logits, params, count)
    Definition(logits.double().numpy(), params, keeps_ties=True).check(found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(HOST, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(("normal", 0, 70), SamplingParams(temperature=5e-324))
@example(("ties", 0, 70), SamplingParams(temperature=5e-324))
@example(("ends", 0, 64), SamplingParams(temperature=1e300, top_p=0.9))
@example(("denormal", 0, 70), SamplingParams(temperature=1e-40, top_p=0.5))
@given(LOGITS, SETTINGS)
def test_device_follows_the_definition(
    device: DeviceSampler, shape: tuple[str, int, int], params: SamplingParams
) -> None:
    check_device(device, shape, params, 4)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_host_follows_the_definition_campaign() -> None:
    found = settings(max_examples=NUM_EXAMPLES, deadline=None, database=None)(given(LOGITS, SETTINGS)(check_host))
    found()


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_device_follows_the_definition_campaign(device: DeviceSampler) -> None:
    @settings(max_examples=NUM_EXAMPLES // 20, deadline=None, database=None)
    @given(LOGITS, SETTINGS)
    def check(shape: tuple[str, int, int], params: SamplingParams) -> None:
        check_device(device, shape, params, 32)

    check()


BIASES = st.dictionaries(st.integers(0, 69), st.sampled_from([-100.0, -1e-45, 1e-40, 1.0, 100.0]), max_size=70)
EDITS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([0.01, 1.0, 1.1, 100.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 5e-324, 1e-45, 2.0]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 1e-40, 2.0]),
    logit_bias=BIASES.map(lambda bias: tuple(sorted(bias.items()))),
)


def edited(logits: Floats, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> Floats:
    changed = logits.copy()
    for token, bias in params.logit_bias:
        changed[token] = np.clip(changed[token] + bias, -LARGEST, LARGEST)
    for token in {*prompt, *answer}:
        times, value = list(answer).count(token), changed[token]
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
        if params.has_penalties:
            changed[token] = np.clip(value, -LARGEST, LARGEST)
    return changed


@HOST
@given(
    st.sampled_from(sorted(KINDS)),
    EDITS,
    st.lists(st.integers(0, 69), min_size=1, max_size=30),
    st.lists(st.integers(0, 69), max_size=30),
)
def test_extreme_edits_follow_the_definition(
    kind: str, params: SamplingParams, prompt: list[int], answer: list[int]
) -> None:
    logits = make(kind, 0, 70)
    assert sampling_problem(params, len(logits)) is None
    expected = edited(logits.double().numpy(), params, prompt, answer)
    penalties = logit_penalties(params, [*prompt, *answer], len(prompt))
    changed = logits.clone()
    if penalties is not None:
        penalties.apply(changed, len(answer))
    assert torch.isfinite(changed).all()
    # The error is relative to the largest term, because terms can cancel. A repetition penalty multiplies negative
    # logits and divides positive ones.
    penalty = params.repetition_penalty
    scale = np.abs(logits.double().numpy()).clip(min=100.0) * max(1, penalty, 1 / penalty)
    assert (np.abs(changed.double().numpy() - expected) <= 1e-6 * scale).all()


@HOST
@given(LOGITS, st.sampled_from([0.0, 5e-324, 1.0]))
def test_log_probabilities_of_extreme_logits_are_correct(shape: tuple[str, int, int], temperature: float) -> None:
    logits = make(*shape)
    (found,) = drawn_by_host(logits, SamplingParams(temperature=temperature, num_logprobs=5), 1)
    assert found.logprobs is not None
    exact = logits.double().log_softmax(0)
    for token_id, logprob in [(found.token_id, found.logprobs.logprob), *found.logprobs.top]:
        assert token_id is not None
        assert logprob <= 0
        wanted = float(exact[token_id])
        # Values below the lowest float32 become minus infinity, which the API reports as -9999.
        assert logprob == pytest.approx(wanted, rel=1e-5, abs=1e-5) or (math.isinf(logprob) and wanted < -1e38)
