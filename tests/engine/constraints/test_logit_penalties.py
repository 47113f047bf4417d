from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.engine.constraints.grammar import Masks
from loramux.engine.constraints.logit_penalties import TokenMarks, logit_penalties
from loramux.engine.device.accelerator import Accelerator, HostAccelerator
from loramux.engine.device.backend import SampleTokens
from loramux.engine.execution.device_sampler import DeviceSampler
from loramux.engine.execution.direct_executor import DirectForward
from loramux.engine.execution.graph_executor import GraphForward
from loramux.engine.execution.sampler import FinishedStep, SampledToken, sample, uniforms_of
from loramux.engine.execution.step_buffer import SamplingInputs
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.engine.sequences.batch import Batch, SamplingRow
from loramux.kernels.reference.sampling import reference_sample_tokens
from tests.engine.device.gpu_backend import gpu_backend
from tests.engine.simulated_engine import Simulation, simulate_engine

VOCAB_SIZE = 40
TABLE = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 2


def expected_logits(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The reference: the definition of vLLM, token by token."""
    changed = logits.clone()
    for token, bias in params.logit_bias:
        changed[token] += bias
    for token in {*prompt, *output}:
        scale = params.repetition_penalty
        changed[token] = changed[token] / scale if changed[token] > 0 else changed[token] * scale
    for token in set(output):
        changed[token] -= params.frequency_penalty * output.count(token)
        changed[token] -= params.presence_penalty
    return changed


tokens = st.integers(0, VOCAB_SIZE - 1)
bias = st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=6)


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(tokens, min_size=1, max_size=12),
    output=st.lists(tokens, max_size=12),
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    presence=st.sampled_from([0.0, -2.0, 1.7]),
    frequency=st.sampled_from([0.0, 0.3, -0.7]),
    bias=bias,
)
def test_edited_row_matches_vllm(
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias.items()),
    )
    logits = TABLE[prompt[-1]].clone()
    expected = expected_logits(logits, params, prompt, output)
    penalties = logit_penalties(params, [*prompt, *output], len(prompt))
    assert (penalties is None) == (params == SamplingParams())
    if penalties is not None:
        penalties.apply(logits, len(output))
    torch.testing.assert_close(logits, expected)


def test_bias_of_100_selects_and_minus_100_bans() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 3] = 20.0
    for params, allowed in [
        (SamplingParams(logit_bias=((3, -100.0),)), set(range(VOCAB_SIZE)) - {3}),
        (SamplingParams(logit_bias=((8, 100.0),)), {8}),
    ]:
        rows = [SamplingRow(params, seed, 0, logit_penalties(params, [1], 1)) for seed in range(300)]
        assert {one.token_id for one in sample(logits.expand(300, -1), rows, ())} <= allowed


def test_edits_leave_logits_and_other_rows_unchanged() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, logit_bias=((5, 100.0),), num_logprobs=1)
    logits = TABLE[:3].clone()
    rows = [
        SamplingRow(SamplingParams(seed=1), 1, 0),
        SamplingRow(params, 0, 2, logit_penalties(params, [1, 5, 5], 1)),
        SamplingRow(SamplingParams(temperature=0.0), 0, 0),
    ]
    found = sample(logits, rows, ())
    assert torch.equal(logits, TABLE[:3])
    assert [found[0]] == sample(logits[:1], rows[:1], ())
    assert found[1].token_id == 5
    assert found[1].logprobs is not None
    assert found[1].logprobs.logprob == pytest.approx(float(torch.log_softmax(TABLE[1], 0)[5]))
    assert found[2].token_id == int(TABLE[2].argmax())


def test_each_token_is_read_only_once() -> None:
    class CountedList(list[int]):
        num_read = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            found = list.__getitem__(self, key)
            self.num_read += len(found)
            return found

    tokens = CountedList(range(20))
    penalties = logit_penalties(SamplingParams(presence_penalty=1.0), tokens, 20)
    assert penalties is not None
    for num_chosen in range(15):
        penalties.marks(num_chosen)
        tokens.append(7)
    assert tokens.num_read == 20 + 14


def test_marks_count_output_tokens_and_flag_prompt_tokens() -> None:
    marks = TokenMarks([5, 6, 5])
    for token in (6, 6, 9):
        marks.add(token)
    ids, values = marks.tensors()
    assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == {5: 1, 6: 5, 9: 2}


def test_settings_without_edits_return_none() -> None:
    assert logit_penalties(SamplingParams(temperature=0.3, top_k=4, min_p=0.1, seed=1, min_tokens=4), [1, 2], 2) is None


def last_rows(batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
    return tokens[torch.from_numpy(batch.sample_rows).long().to(tokens.device)].long()


class HostTable:
    """A model whose logits depend only on the last token, with sampling on the host."""

    def submit(self, batch: Batch) -> DirectForward:
        return DirectForward(TABLE[last_rows(batch, torch.from_numpy(batch.tokens))], batch.samples, (), None)


@dataclass
class DeviceTable:
    """The same model on a device, which has the previous step's tokens before the host does."""

    sample_tokens: SampleTokens
    accelerator: Accelerator = field(default_factory=HostAccelerator)
    max_samples: int = 16
    sampler: DeviceSampler = field(init=False)
    num_unknown: int = 0

    def __post_init__(self) -> None:
        self.sampler = DeviceSampler(self.accelerator, self.sample_tokens, self.max_samples, ())

    def submit(self, batch: Batch) -> GraphForward:
        self.num_unknown += int((batch.tokens < 0).sum())
        device = self.accelerator.device
        known = self.sampler.resolve(torch.from_numpy(batch.tokens).to(device))
        logits = TABLE.to(device)[last_rows(batch, known)]
        return GraphForward(self.sampler, logits, batch.samples, self.inputs(batch.samples))

    def inputs(self, samples: Sequence[SamplingRow]) -> SamplingInputs:
        params = [one.params for one in samples]
        column = partial(torch.tensor, dtype=torch.float32, device=self.accelerator.device)
        return SamplingInputs(
            temperature=column([one.temperature for one in params]),
            top_k=column([one.top_k for one in params]).int(),
            top_p=column([one.top_p for one in params]),
            min_p=column([one.min_p for one in params]),
            uniform=column(uniforms_of(samples)),
        )


def reference(*arguments: torch.Tensor, all_greedy: bool = False) -> None:
    reference_sample_tokens(*arguments)


GREEDY = SamplingParams(temperature=0.0)
ASKED = {
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.4),
    "presence": SamplingParams(temperature=0.0, presence_penalty=1.2),
    "frequency": SamplingParams(temperature=0.0, frequency_penalty=0.4),
    "reward": SamplingParams(temperature=0.0, frequency_penalty=-1.0, repetition_penalty=0.8),
    "bias": SamplingParams(temperature=0.0, logit_bias=((2, 4.0), (3, -100.0))),
    "all, random": SamplingParams(
        temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, logit_bias=((1, 2.0),), seed=11
    ),
    "none": GREEDY,
}


def generated(simulation: Simulation, num_tokens: int) -> dict[str, list[int]]:
    adds = [
        Add(sequence_id=name, prompt=tuple(range(3 + i, 9 + 4 * i)), max_tokens=num_tokens, sampling=sampling)
        for i, (name, sampling) in enumerate(ASKED.items())
    ]
    for add in adds:
        simulation.engine.add(b"", add)
    simulation.run()
    assert all(len(tokens) == num_tokens for tokens in simulation.tokens.values())
    return simulation.tokens


def simulate(executor: object, monkeypatch: pytest.MonkeyPatch, lookahead: bool, **sizes: int) -> Simulation:
    simulation = simulate_engine(lookahead=lookahead, **sizes)
    monkeypatch.setattr(simulation.engine, "_executor", executor)
    return simulation


def naive(prompt: tuple[int, ...], params: SamplingParams, num_tokens: int) -> list[int]:
    output: list[int] = []
    for _ in range(num_tokens):
        last = [*prompt, *output][-1]
        output.append(int(expected_logits(TABLE[last], params, list(prompt), output).argmax()))
    return output


def test_host_sampling_follows_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    found = generated(simulate(HostTable(), monkeypatch, lookahead=False), 24)
    for i, (name, params) in enumerate(ASKED.items()):
        if params.temperature == 0:
            assert found[name] == naive(tuple(range(3 + i, 9 + 4 * i)), params, 24), name
    plain = naive(tuple(range(3, 9)), GREEDY, 24)
    # Without penalties, the model repeats itself.
    assert len(set(plain)) < 12 < len(set(found["presence"]))


@pytest.mark.parametrize("num_pages", [64, 13], ids=["room for all", "preemptions"])
def test_penalties_miss_no_token_in_flight(monkeypatch: pytest.MonkeyPatch, num_pages: int) -> None:
    expected = generated(simulate(HostTable(), monkeypatch, lookahead=False), 24)
    device = DeviceTable(reference)
    simulation = simulate(device, monkeypatch, lookahead=True, num_pages=num_pages)
    assert generated(simulation, 24) == expected
    assert device.num_unknown > 100
    assert (simulation.scheduler.num_preemptions > 0) == (num_pages == 13)


def test_sequence_skipped_by_a_step_keeps_its_tokens() -> None:
    params, prompt = ASKED["frequency"], (3, 4, 5)
    device = DeviceTable(reference)
    tokens = list(prompt)
    penalties = logit_penalties(params, tokens, len(prompt))
    committed: list[int] = []
    for step in range(40):
        row = SamplingRow(params, 0, step, penalties)
        logits = TABLE[[committed[-1] if committed else prompt[-1]]]
        inputs = device.inputs([row])
        committed.extend(one.token_id or 0 for one in device.sampler.choose(logits, [row], inputs).tokens())
        if step in (14, 15, 29):
            # After the sequence's earlier tokens are known, run a step without it.
            tokens[len(prompt) :] = committed
            other = SamplingRow(GREEDY, 0, 0)
            device.sampler.choose(TABLE[[0]], [other], device.inputs([other]))
    assert committed == naive(prompt, params, 40)


def test_device_kernel_sees_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generated(simulate(HostTable(), monkeypatch, lookahead=False), 6)
    backend = gpu_backend(monkeypatch)
    assert backend.sample_tokens is not None
    simulation = simulate(DeviceTable(backend.sample_tokens, backend.accelerator), monkeypatch, lookahead=True)
    assert generated(simulation, 6) == expected


def test_host_lookahead_records_chosen_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    class AheadTable(HostTable):
        """A host model that fills in the previous step's tokens if the engine has not read them yet."""

        def __init__(self) -> None:
            self.chosen: list[SampledToken] = []

        def submit(self, batch: Batch) -> Any:
            for place, token in enumerate(batch.tokens.tolist()):
                if token < 0:
                    batch.tokens[place] = self.chosen[-1 - token].token_id
            forward = HostTable.submit(self, batch)

            def choose(masks: Masks, unused: Collection[int]) -> FinishedStep:
                step = forward.choose(masks, unused)
                self.chosen = step.sampled
                return step

            return SimpleNamespace(choose=choose)

    expected = generated(simulate(HostTable(), monkeypatch, lookahead=False), 12)
    assert generated(simulate(AheadTable(), monkeypatch, lookahead=True), 12) == expected


@pytest.mark.parametrize("params", [SamplingParams(frequency_penalty=0.5), SamplingParams(logit_bias=((3, 1.0),))])
def test_penalties_after_drafts_are_those_of_the_longer_text(params: SamplingParams) -> None:
    committed, drafts = [1, 2, 3, 2], [3, 2]
    penalties, longer = logit_penalties(params, committed, 2), logit_penalties(params, [*committed, *drafts], 2)
    assert penalties is not None
    assert longer is not None
    plain, found, expected = TABLE[0].clone(), TABLE[0].clone(), TABLE[0].clone()
    penalties.after(drafts).apply(found, 4)
    longer.apply(expected, 4)
    assert found.tolist() == expected.tolist()
    # The penalties themselves have not changed.
    penalties.apply(plain, 2)
    before = logit_penalties(params, list(committed), 2)
    assert before is not None
    expected = TABLE[0].clone()
    before.apply(expected, 2)
    assert plain.tolist() == expected.tolist()
