"""Settings without effect are ignored. Other settings must be valid values of the request field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.version_files.generation_config import (
    IGNORED,
    GenerationConfig,
    SamplingDefaults,
    parse_generation_config,
)


def test_known_settings_are_read_and_others_are_ignored() -> None:
    document = {
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "max_new_tokens": 512,
        "do_sample": True,
        "pad_token_id": None,
        "suppress_tokens": [[1]],
    }
    found = parse_generation_config(json.dumps(document).encode())
    assert found == GenerationConfig(SamplingDefaults(0.0, 0.9, 20, 0.0, 1.1, 512), ignored=("suppress_tokens",))
    assert parse_generation_config(b'{"temperature": null}') == GenerationConfig()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, ()), (5, (5,)), (0, (0,)), ([7, 5, 7], (7, 5)), ([], ()), (-1, ()), ([-1, 3], (3,)), ([2] * 64, (2,))],
)
def test_end_tokens_are_one_or_several(value: Any, expected: tuple[int, ...]) -> None:
    found = parse_generation_config(json.dumps({"eos_token_id": value, "top_k": 5}).encode())
    assert found.eos_token_ids == expected
    assert found.document() == {"top_k": 5, **({"eos_token_id": list(expected)} if expected else {})}


@pytest.mark.parametrize("value", [True, "5", 5.0, -2, 2**31, 10**400, [[5]], [None], {"a": 5}, [2] * 65])
def test_bad_end_tokens_are_refused(value: Any) -> None:
    with pytest.raises(AdapterRejected, match="eos_token_id must be") as refused:
        parse_generation_config(json.dumps({"eos_token_id": value}).encode())
    assert (refused.value.code, refused.value.param) == ("invalid_generation_config", "eos_token_id")


def test_settings_that_would_change_answers_are_named() -> None:
    neutral = {name: value for name, value in IGNORED.items() if value is not None}
    assert (
        parse_generation_config(json.dumps({**neutral, "max_length": 4096, "use_cache": True}).encode()).ignored == ()
    )
    changed = {"stop_strings": ["</s>"], "no_repeat_ngram_size": 3, "do_sample": False, "num_beams": 2.5}
    assert set(parse_generation_config(json.dumps(changed).encode()).ignored) == changed.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", 1.5),
        ("top_k", -2),
        ("top_k", 2**31),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", 2**63),
        ("max_new_tokens", [1]),
    ],
)
def test_bad_value_is_refused_with_the_setting(name: str, value: Any) -> None:
    with pytest.raises(AdapterRejected, match=f"{name} must be") as refused:
        parse_generation_config(json.dumps({name: value}).encode())
    assert (refused.value.code, refused.value.param) == ("invalid_generation_config", name)


def test_settings_complete_each_other() -> None:
    own, base = SamplingDefaults(temperature=0.0, top_k=5), SamplingDefaults(temperature=1.0, min_p=0.1)
    assert own.over(base) == SamplingDefaults(temperature=0.0, top_k=5, min_p=0.1)
