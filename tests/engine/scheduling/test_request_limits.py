"""The engine rejects settings that no kernel can handle, even if a gateway lets them through."""

from __future__ import annotations

import math

import pytest

from loramux.engine.protocol.messages import SamplingParams
from loramux.engine.scheduling.request_limits import sampling_problem

VOCAB_SIZE = 70


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, top_p=0.0, min_p=1.0, num_logprobs=0, top_k=2**31 - 1),
        SamplingParams(repetition_penalty=0.01, presence_penalty=-2, frequency_penalty=2),
        SamplingParams(repetition_penalty=100, logit_bias=((0, -100), (69, 100)), stop_token_ids=(0, 69)),
    ],
    ids=["default", "at the edges", "penalties", "ids"],
)
def test_valid_settings_are_accepted(params: SamplingParams) -> None:
    assert sampling_problem(params, VOCAB_SIZE) is None


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(temperature=-0.1), "temperature"),
        (SamplingParams(temperature=math.nan), "temperature"),
        (SamplingParams(temperature=math.inf), "temperature"),
        (SamplingParams(top_p=1.1), "top_p"),
        (SamplingParams(top_p=math.nan), "top_p"),
        (SamplingParams(top_k=-1), "top_k"),
        (SamplingParams(top_k=2**31), "top_k"),
        (SamplingParams(min_p=-0.1), "min_p"),
        (SamplingParams(min_p=1.1), "min_p"),
        (SamplingParams(min_p=math.nan), "min_p"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(repetition_penalty=-1.0), "repetition_penalty"),
        (SamplingParams(repetition_penalty=math.nan), "repetition_penalty"),
        (SamplingParams(repetition_penalty=math.inf), "repetition_penalty"),
        (SamplingParams(presence_penalty=2.1), "presence_penalty"),
        (SamplingParams(presence_penalty=math.nan), "presence_penalty"),
        (SamplingParams(frequency_penalty=-2.1), "frequency_penalty"),
        (SamplingParams(frequency_penalty=math.nan), "frequency_penalty"),
        (SamplingParams(num_logprobs=-1), "num_logprobs"),
        (SamplingParams(min_tokens=-1), "min_tokens"),
        (SamplingParams(stop_token_ids=(0, VOCAB_SIZE)), "stop_token_ids"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids"),
        (SamplingParams(logprob_token_ids=(0, VOCAB_SIZE)), "logprob_token_ids"),
        (SamplingParams(logprob_token_ids=(-1,)), "logprob_token_ids"),
        (SamplingParams(logprob_token_ids=(5,) * 129), "logprob_token_ids"),
        (SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),)), "logit_bias"),
        (SamplingParams(logit_bias=((-1, 1.0),)), "logit_bias"),
        (SamplingParams(logit_bias=((3, 1.0), (3, 2.0))), "logit_bias"),
        (SamplingParams(logit_bias=((3, 100.5),)), "logit_bias"),
        (SamplingParams(logit_bias=((3, math.nan),)), "logit_bias"),
        (SamplingParams(logit_bias=tuple((i, 1.0) for i in range(301))), "logit_bias"),
    ],
    ids=repr,
)
def test_invalid_field_is_named(params: SamplingParams, field: str) -> None:
    problem = sampling_problem(params, 1000 if len(params.logit_bias) > 300 else VOCAB_SIZE)
    assert problem is not None
    assert problem.split()[0] == field
