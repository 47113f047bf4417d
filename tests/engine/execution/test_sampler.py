from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from loramux.engine.execution import sampler
from loramux.engine.execution.sampler import NUM_LIKELIEST, sample
from loramux.engine.protocol.messages import SamplingParams
from loramux.engine.sequences.batch import SamplingRow
from loramux.kernels.reference.sampling import kept_weights


def sampling_row(params: SamplingParams, seed: int = 0, num_chosen: int = 0) -> SamplingRow:
    return SamplingRow(params, seed, num_chosen)


def draw(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    rows = [sampling_row(params, seed=seed) for seed in range(count)]
    tokens = [one.token_id for one in sample(logits.expand(count, -1), rows, ())]
    assert None not in tokens
    return [int(token) for token in tokens if token is not None]


LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.5, 0.25, 0.15, 0.1]),
        (SamplingParams(temperature=0.5), [0.25, 0.0625, 0.0225, 0.01]),
        (SamplingParams(top_k=2), [0.5, 0.25, 0, 0]),
        (SamplingParams(top_p=0.8), [0.5, 0.25, 0.15, 0]),
        (SamplingParams(top_p=0.5), [1, 0, 0, 0]),
        (SamplingParams(top_p=0.0), [1, 0, 0, 0]),
        (SamplingParams(top_k=3, top_p=0.7), [0.5, 0.25, 0, 0]),
        (SamplingParams(top_k=2, top_p=0.6), [1, 0, 0, 0]),
        (SamplingParams(min_p=0.29), [0.5, 0.25, 0.15, 0]),
        (SamplingParams(min_p=0.31), [0.5, 0.25, 0, 0]),
        (SamplingParams(min_p=1.0), [1, 0, 0, 0]),
        (SamplingParams(temperature=0.5, min_p=0.1), [0.25, 0.0625, 0, 0]),
        (SamplingParams(temperature=0.5, min_p=0.08), [0.25, 0.0625, 0.0225, 0]),
        (SamplingParams(top_k=3, top_p=0.99, min_p=0.4), [0.5, 0.25, 0, 0]),
        (SamplingParams(temperature=1e-6), [1, 0, 0, 0]),
        (SamplingParams(temperature=0.0), [1, 0, 0, 0]),
    ],
    ids=[
        "plain", "cold", "top 2", "nucleus 0.8", "nucleus 0.5", "nucleus 0", "both", "nucleus of the top 2",
        "min_p below a share", "min_p above it", "min_p of all", "min_p after the temperature", "min_p below it",
        "all three", "nearly greedy", "greedy",
    ],
)  # fmt: skip
def test_distribution_matches_the_settings(params: SamplingParams, expected: list[float]) -> None:
    count = 20_000
    drawn = torch.bincount(torch.tensor(draw(LOGITS, params, count)), minlength=4) / count
    wanted = torch.tensor(expected) / sum(expected)
    # Allow four standard deviations of a binomial proportion.
    assert ((drawn - wanted).abs() <= 4 * (wanted * (1 - wanted) / count).sqrt() + 1e-9).all()


@pytest.mark.parametrize(
    ("temperature", "expected"), [(1.0, range(1)), (4.0, range(2000))], ids=["few", "more than are looked at first"]
)
def test_min_p_drops_unlikely_tokens_of_a_large_vocabulary(temperature: float, expected: range) -> None:
    logits = torch.full((3000,), -9.0)
    # These tokens' weights relative to the most likely token are 0.37, or 0.78 at temperature 4.
    logits[:2000] = -1.0
    logits[0] = 0.0
    drawn = set(draw(logits, SamplingParams(min_p=0.5, temperature=temperature), 4000))
    assert drawn <= set(expected)
    assert len(drawn) >= min(len(expected), 1500)


@pytest.mark.parametrize("params", [SamplingParams(temperature=2.0), SamplingParams(min_p=0.1)], ids=["plain", "min_p"])
def test_row_does_not_depend_on_its_neighbours(params: SamplingParams) -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    rows = [sampling_row(params, seed=row, num_chosen=row) for row in range(5)]
    together = [one.token_id for one in sample(logits, rows, ())]
    alone = [sample(logits[row : row + 1], [rows[row]], ())[0].token_id for row in range(5)]
    assert together == alone


NEED_MANY = [
    SamplingParams(top_p=0.9),
    SamplingParams(min_p=1e-9),
    SamplingParams(top_k=1100),
    SamplingParams(top_k=1100, top_p=0.9),
    SamplingParams(top_k=1100, top_p=0.9, min_p=1.0),
]


@pytest.mark.parametrize("params", NEED_MANY, ids=["top_p", "min_p", "top_k", "both", "all three"])
def test_row_with_many_likely_tokens_changes_no_neighbour(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integer logits, because equal ones are at the borders of what is kept."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (6, 70_000), generator=generator).float()
    rows = [sampling_row(SamplingParams(top_k=20, top_p=0.8) if row % 2 else params, seed=row) for row in range(6)]
    sizes: list[tuple[int, ...]] = []
    sort, topk = np.sort, torch.topk
    monkeypatch.setattr(np, "sort", lambda a, axis: sizes.append(a.shape) or sort(a, axis))
    monkeypatch.setattr(torch, "topk", lambda a, k, dim: sizes.append((len(a), k)) or topk(a, k, dim))
    together = [one.token_id for one in sample(logits, rows, ())]
    is_large = params.min_p < 1
    assert sizes == [(6, NUM_LIKELIEST), (3, 70_000)][: 2 if is_large else None]
    assert together == [sample(logits[row : row + 1], [rows[row]], ())[0].token_id for row in range(6)]


@pytest.mark.parametrize("params", NEED_MANY, ids=["top_p", "min_p", "top_k", "both", "all three"])
def test_tokens_drawn_from_many_follow_the_specification(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each logit is unique, because the specification keeps equal ones together. Shares are at least 1 / 2000."""
    logits = (torch.randperm(1200, generator=torch.Generator().manual_seed(1)) / 6000)[None]
    settings = (params.temperature, params.top_k, params.top_p, params.min_p)
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    columns = [torch.tensor([value], dtype=dtype) for value, dtype in zip(settings, dtypes, strict=True)]
    kept = set(kept_weights(logits, *columns)[0].nonzero().squeeze(1).tolist())
    monkeypatch.setattr(sampler, "uniforms_of", lambda rows: ((np.arange(2000) + 0.5) / 2000).astype(np.float32))
    assert set(draw(logits[0], params, 2000)) == kept


def test_seed_gives_a_new_number_for_each_token() -> None:
    params = SamplingParams(temperature=100.0)
    logits = torch.zeros(1, 1000)
    drawn = {sample(logits, [sampling_row(params, seed=1, num_chosen=n)], ())[0].token_id for n in range(50)}
    assert len(drawn) > 40


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "infinite"])
def test_non_finite_row_yields_no_token_and_affects_no_other(bad: float) -> None:
    logits = LOGITS.repeat(2, 1)
    logits[0, 2] = bad
    found = sample(logits, [sampling_row(SamplingParams(temperature=0.0)), sampling_row(SamplingParams())], ())
    assert found[0].token_id is None
    assert found[1].token_id is not None


def test_minimum_length_forbids_stop_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(1,))
    for num_chosen, expected in [(0, 2), (1, 2), (2, 0)]:
        assert sample(LOGITS[None], [sampling_row(params, num_chosen=num_chosen)], (0,))[0].token_id == expected


def test_ignored_eos_is_not_forbidden() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True, stop_token_ids=(1,))
    assert sample(LOGITS[None], [sampling_row(params)], (0,))[0].token_id == 0
    assert sample(LOGITS[None], [sampling_row(params)], (2,))[0].token_id == 0


def test_logprobs_come_from_the_models_logits() -> None:
    params = SamplingParams(temperature=0.0, num_logprobs=2)
    found = sample(LOGITS[None], [sampling_row(params)], ())[0].logprobs
    assert found is not None
    assert found.logprob == pytest.approx(math.log(0.5))
    assert [token for token, _ in found.top] == [0, 1]
    assert [value for _, value in found.top] == pytest.approx([math.log(0.5), math.log(0.25)])


@pytest.mark.parametrize("token", [0, 7, 8, 39])
def test_the_only_allowed_token_is_chosen_whatever_the_settings(token: int) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(token))
    logits[4, 3] = torch.nan
    mask = np.zeros(8, np.uint8)
    mask[token // 8] = 1 << token % 8
    settings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=2.0, top_k=3, min_p=0.1),
        SamplingParams(temperature=0.7, num_logprobs=2, logit_bias=((token, -100.0),)),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0),
    ]
    rows = [sampling_row(params, seed=index) for index, params in enumerate(settings)]
    found = sample(logits, rows, (), dict.fromkeys((0, 1, 2, 4), mask))
    assert [one.token_id for one in found[:3]] == [token] * 3
    assert found[2].logprobs is not None
    assert found[2].logprobs.logprob == pytest.approx(float(torch.log_softmax(logits[2], 0)[token]))
    assert found[3] == sample(logits[3:4], rows[3:4], ())[0]
    assert found[4].token_id is None


def test_the_only_allowed_token_may_be_forbidden_by_the_minimum_length() -> None:
    mask = np.array([0, 2, 0, 0], np.uint8)
    params = SamplingParams(temperature=0.0, stop_token_ids=(9,), min_tokens=5)
    [found] = sample(torch.ones(1, 30), [sampling_row(params)], (), {0: mask})
    assert found.token_id != 9
