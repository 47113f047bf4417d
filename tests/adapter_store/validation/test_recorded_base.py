from __future__ import annotations

from pathlib import Path

import pytest

from loramux.adapter_store.validation.recorded_base import with_recorded_base


@pytest.mark.parametrize("config", [None, "{", "[]", "{}", '{"base_model_name_or_path": null}'])
def test_a_configuration_without_a_base_adds_nothing(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)
    assert with_recorded_base("base_mismatch", "it differs", tmp_path) == "it differs"


def test_another_rejection_does_not_name_the_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    assert with_recorded_base("zero_effect", "no effect", tmp_path) == "no effect"
