from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from loramux.engine.constraints.logit_penalties import logit_penalties
from loramux.engine.device.accelerator import Fence, HostAccelerator
from loramux.engine.device.backend import Backend
from loramux.engine.execution import device_sampler
from loramux.engine.execution.device_sampler import DeviceSampler
from loramux.engine.execution.sampler import SampledToken, sample, uniforms_of
from loramux.engine.execution.step_buffer import SamplingInputs
from loramux.engine.execution.token_marks import DeviceTokenMarks
from loramux.engine.protocol.messages import SamplingParams
from loramux.engine.sequences.batch import SamplingRow
from tests.engine.device.gpu_backend import gpu_backend
from tests.kernels.gpu.interpreted import DEVICE, HAS_GPU

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
        # Pad to the step's size. The padding's values do not matter.
        return torch.tensor([*values, *[0] * (MAX_SAMPLES - len(values))], dtype=dtype, device=DEVICE)

    params = [row.params for row in rows]
    return SamplingInputs(
        temperature=column([one.temperature for one in params], torch.float32),
        top_k=column([one.top_k for one in params], torch.int32),
        top_p=column([one.top_p for one in params], torch.float32),
        min_p=column([one.min_p for one in params], torch.float32),
        uniform=column(uniforms_of(rows).tolist(), torch.float32),
    )


def choose(sampler: DeviceSampler, logits: torch.Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    return sampler.choose(logits.clone().to(DEVICE), rows, inputs_of(rows)).tokens()


def random_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(num_rows))


def test_greedy_rows_and_log_probabilities_match_the_host(sampler: DeviceSampler) -> None:
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


def test_log_probabilities_ignore_forbidden_and_truncated_tokens(sampler: DeviceSampler) -> None:
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
def test_non_finite_row_has_no_token_and_affects_no_other(
    sampler: DeviceSampler, params: SamplingParams, value: float
) -> None:
    logits = random_logits(3)
    logits[1, EOS[0]] = value
    tokens = choose(sampler, logits, rows_of(GREEDY, params, GREEDY))
    assert tokens[1].token_id is None
    assert [tokens[row].token_id for row in (0, 2)] == logits[[0, 2]].argmax(1).tolist()


def test_resolve_replaces_negative_token_ids(sampler: DeviceSampler) -> None:
    logits = random_logits(4)
    logits[2] = torch.nan
    chosen = [token.token_id for token in choose(sampler, logits, rows_of(*[GREEDY] * 4))]
    assert chosen[2] is None
    tokens = torch.tensor([7, -1, 0, -4, -3, -2], dtype=torch.int32, device=DEVICE)
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
        pytest.skip("the order of calls is only visible on the host")
    sampler = DeviceSampler(LateAccelerator(), backend.sample_tokens, MAX_SAMPLES, EOS)
    rows = rows_of(SamplingParams(temperature=0.0, num_logprobs=1))
    step = sampler.choose(random_logits(1), rows, inputs_of(rows))
    assert order == ["downloaded"] * 4 + ["fenced"]
    step.tokens()
    assert order[-1] == "waited"


PROMPT = [4, 9, 9, 2, 31]
EDITED = [
    SamplingParams(temperature=0.0, repetition_penalty=1.7),
    SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, logit_bias=((0, -100.0), (31, 2.5))),
    SamplingParams(temperature=0.0, repetition_penalty=0.6, frequency_penalty=-0.4, logit_bias=((7, 3.0),)),
    SamplingParams(temperature=1.0, presence_penalty=2.0, seed=5),
    SamplingParams(temperature=0.0, presence_penalty=2.0, min_tokens=3, num_logprobs=2),
]


def edited_rows(params: list[SamplingParams], num_output: int) -> list[SamplingRow]:
    rows = []
    for seed, one in enumerate(params):
        output = torch.randint(VOCAB_SIZE, (num_output,), generator=torch.Generator().manual_seed(seed)).tolist()
        penalties = logit_penalties(one, [*PROMPT, *output], len(PROMPT))
        rows.append(SamplingRow(one, seed, num_output, penalties))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("at_once", [2, 16], ids=["in several parts", "in one"])
def test_bias_and_penalties_match_the_host(
    sampler: DeviceSampler, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, at_once: int
) -> None:
    monkeypatch.setattr(device_sampler, "EDITED_AT_ONCE", at_once)
    # Put unedited rows before and between the edited rows.
    params = [GREEDY, *EDITED[:3], GREEDY, *EDITED[3:]]
    # These logits are large: rounding to bfloat16 changes them by about as much as the penalties.
    logits = (random_logits(len(params)) * 12).to(dtype)
    found = choose(sampler, logits[:8], edited_rows(params[:8], 6))
    expected = sample(logits.float()[:8], edited_rows(params[:8], 6), EOS)
    assert [one.token_id for one in found] == [one.token_id for one in expected]


def test_edited_rows_do_not_affect_other_rows(sampler: DeviceSampler) -> None:
    plain = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
    logits = random_logits(3)
    rows = [SamplingRow(plain, 3, 0), edited_rows(EDITED[:1], 2)[0], SamplingRow(GREEDY, 0, 0)]
    alone = [choose(sampler, logits[[row]], [rows[row]])[0] for row in (0, 2)]
    together = choose(sampler, logits, rows)
    assert [together[0], together[2]] == alone


def test_edits_do_not_change_log_probabilities(sampler: DeviceSampler) -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((5, 100.0),), presence_penalty=2.0, num_logprobs=1)
    logits = random_logits(1)
    (found,) = choose(sampler, logits, edited_rows([params], 3))
    assert found.token_id == 5
    assert found.logprobs is not None
    expected = torch.log_softmax(logits[0], 0)
    assert found.logprobs.logprob == pytest.approx(float(expected[5]), abs=1e-5)
    assert found.logprobs.top[0][0] == int(expected.argmax())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("params", EDITED, ids=repr)
def test_edits_do_not_hide_a_non_finite_row(sampler: DeviceSampler, params: SamplingParams, value: float) -> None:
    logits = random_logits(1)
    logits[0, 31] = value
    assert choose(sampler, logits, edited_rows([params], 2))[0].token_id is None


@pytest.mark.parametrize("repetition", [0.01, 100.0])
def test_extreme_settings_do_not_make_a_row_look_broken(sampler: DeviceSampler, repetition: float) -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=repetition, logit_bias=((3, -100.0),), min_tokens=9, stop_token_ids=(31,)
    )
    logits = random_logits(1) * 1e29
    rows = edited_rows([params], 6)
    found = choose(sampler, logits, rows)[0].token_id
    assert found is not None
    assert found == sample(logits, rows, EOS)[0].token_id
    assert found not in (*EOS, 31)


def test_marks_follow_the_sequences_of_a_step() -> None:
    marks = DeviceTokenMarks(HostAccelerator())
    rows = edited_rows([EDITED[0]] * 9, 3)
    # Use more rows than fit in the initial memory, then drop some. Some steps have columns for added tokens.
    for further, held in zip((0, 7, 0, 9), (rows[:3], rows, rows[5:], [*rows[:2], *rows[8:]]), strict=True):
        num_columns = VOCAB_SIZE + further
        marks.hold(held, num_columns)
        assert marks.num_held == len(held)
        penalties = [one.logit_penalties for one in held if one.logit_penalties is not None]
        found = marks.rows(marks.slots(penalties), num_columns)
        for row, one in zip(found, penalties, strict=True):
            expected = torch.zeros(num_columns, dtype=torch.int32)
            ids, values = one.marks(3).tensors()
            expected[ids] = values
            assert row.tolist() == expected.tolist()
    marks.hold([], VOCAB_SIZE)
    assert marks.num_held == 0


def test_marks_include_accepted_drafts() -> None:
    """The step marks only the token that it chose first. Tokens that were accepted after it are on the host."""
    marks, tokens = DeviceTokenMarks(HostAccelerator()), [5, 6]
    penalties = logit_penalties(EDITED[0], tokens, 2)
    assert penalties is not None

    def held(num_chosen: int) -> list[int]:
        marks.hold([SamplingRow(EDITED[0], 0, num_chosen, penalties)], VOCAB_SIZE)
        found: list[int] = marks.rows(marks.slots([penalties]), VOCAB_SIZE)[0].tolist()
        return found

    held(0)
    tokens += [7, 8, 7]
    marks.mark([penalties], marks.slots([penalties]), torch.tensor([7]))
    expected = [0] * VOCAB_SIZE
    expected[5], expected[6], expected[7], expected[8] = 1, 1, 4, 2
    assert held(3) == expected


class DeviceOutOfSight(HostAccelerator):
    """A device whose tensors have no contents, so any attempt to read them on the host fails."""

    device = torch.device("meta")

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type == "cpu"
        return tensor.to(self.device)


def test_submitting_a_step_never_waits_for_the_device() -> None:
    def choose_nothing(*arguments: Any, **options: Any) -> None:
        assert all(one.device.type == "meta" for one in arguments[:7])

    sampler = DeviceSampler(DeviceOutOfSight(), choose_nothing, MAX_SAMPLES, EOS)
    rows = edited_rows([GREEDY, *EDITED], 4)
    inputs = inputs_of(rows)
    far = SamplingInputs(
        **{name: getattr(inputs, name).to("meta") for name in ("temperature", "top_k", "top_p", "min_p", "uniform")}
    )
    for num_chosen in (4, 5):
        logits = torch.empty(len(rows), VOCAB_SIZE, device="meta")
        step = sampler.choose(logits, [msgspec.structs.replace(row, num_chosen=num_chosen) for row in rows], far)
        assert step.chosen.device.type == "meta"
    with pytest.raises(NotImplementedError):
        step.tokens()


@pytest.mark.parametrize("edits", [{}, {"logit_bias": ((3, 5.0),), "presence_penalty": 1.5}], ids=["plain", "edited"])
def test_masked_rows_match_the_host_and_do_not_affect_others(sampler: DeviceSampler, edits: dict[str, Any]) -> None:
    params = [SamplingParams(temperature=temperature, top_p=0.9, **edits) for temperature in (0.0, 1.0) * 3]
    rows = [SamplingRow(one, seed, 0, logit_penalties(one, [0, 1], 2)) for seed, one in enumerate(params)]
    logits = random_logits(len(rows))
    masks = {row: np.zeros(-(-VOCAB_SIZE // 32) * 4, np.uint8) for row in (0, 3, 4)}
    for row, mask in masks.items():
        # Allow three tokens per row, including the vocabulary's last.
        for token in (row, 2 * row + 1, VOCAB_SIZE - 1):
            mask[token // 8] |= 1 << token % 8
    found = sampler.choose(logits.clone().to(DEVICE), rows, inputs_of(rows), masks).tokens()
    host_rows = [SamplingRow(one, seed, 0, logit_penalties(one, [0, 1], 2)) for seed, one in enumerate(params)]
    # Compare only the greedy (even) rows. Random rows may differ, because the host draws in another order.
    assert found[::2] == sample(logits.clone(), host_rows, EOS, masks)[::2]
    for row in masks:
        assert found[row].token_id in (row, 2 * row + 1, VOCAB_SIZE - 1)
    free_rows = [SamplingRow(one, seed, 0, logit_penalties(one, [0, 1], 2)) for seed, one in enumerate(params)]
    free = sampler.choose(logits.clone().to(DEVICE), free_rows, inputs_of(free_rows)).tokens()
    assert [one for row, one in enumerate(found) if row not in masks] == [
        one for row, one in enumerate(free) if row not in masks
    ]


def test_non_finite_masked_row_is_detected(sampler: DeviceSampler) -> None:
    logits = random_logits(1)
    logits[0, 5] = torch.nan
    mask = np.zeros(-(-VOCAB_SIZE // 32) * 4, np.uint8)
    mask[0] = 1
    rows = rows_of(GREEDY)
    found = sampler.choose(logits.to(DEVICE), rows, inputs_of(rows), {0: mask}).tokens()
    assert [one.token_id for one in found] == [None]
