"""Settings that cannot work stop the start with a sentence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loramux.engine.config import EngineConfig
from loramux.engine.errors import ConfigNotUsable


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model_dir="", blob_url="", cache_dir="", **settings)


def test_every_running_sequence_has_a_row_of_a_step() -> None:
    assert config(max_batch_tokens=16, max_sequences=16).max_sequences == 16
    with pytest.raises(ConfigNotUsable, match="max_batch_tokens is 15, less than max_sequences, which is 16"):
        config(max_batch_tokens=15, max_sequences=16)


def test_the_engines_process_checks_what_it_is_handed() -> None:
    document = msgspec.json.encode(config()).replace(b'"max_sequences":64', b'"max_sequences":4096')
    with pytest.raises(ConfigNotUsable, match="4096"):
        msgspec.json.decode(document, type=EngineConfig)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan"), float("inf")])
def test_not_everything_may_be_pinned(share: float) -> None:
    with pytest.raises(ConfigNotUsable, match="max_pinned_share"):
        config(max_pinned_share=share)
