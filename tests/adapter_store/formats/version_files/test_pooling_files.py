from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.version_files.pooling_files import (
    DEFAULT_POOLING,
    MAX_BYTES,
    Pooling,
    base_pooling,
    directory_pooling,
    parse_pooling,
    pooling_file,
)

STEPS = "sentence_transformers.models."


def write(directory: Path, modules: Any, pooling: Any = None) -> Path:
    (directory / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    if pooling is not None:
        text = pooling if isinstance(pooling, str) else json.dumps(pooling)
        (directory / "1_Pooling" / "config.json").write_text(text)
    return directory


def steps(*names: str, path: str = "1_Pooling") -> list[dict[str, Any]]:
    return [
        {"idx": index, "name": str(index), "path": path if name == "Pooling" else "", "type": STEPS + name}
        for index, name in enumerate(names)
    ]


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_lasttoken": True, "word_embedding_dimension": 8}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_the_files_of_sentence_transformers_are_followed(
    tmp_path: Path, config: dict[str, Any], kind: Any, normalises: bool
) -> None:
    names = ["Transformer", "Pooling", *(["Normalize"] if normalises else [])]
    assert directory_pooling(write(tmp_path, steps(*names), config)) == Pooling(kind, normalises)


def test_a_setting_takes_precedence_even_over_files_that_cannot_be_used(tmp_path: Path) -> None:
    write(tmp_path, steps("Transformer", "Pooling", "Dense"), {"pooling_mode": "mean"})
    assert base_pooling(tmp_path, "cls") == Pooling("cls")
    with pytest.raises(AdapterRejected, match="'Dense'"):
        base_pooling(tmp_path, "auto")


def test_without_files_the_last_token_is_taken(tmp_path: Path) -> None:
    assert base_pooling(tmp_path, "auto") == DEFAULT_POOLING == Pooling("last", is_normalized=True)


MEAN = {"pooling_mode_mean_tokens": True}
BAD: dict[str, tuple[Any, Any]] = {
    "not JSON": ("[", MEAN),
    "not a list": ({}, MEAN),
    "no modules": ([], MEAN),
    "a number": ([1], MEAN),
    "no type": ([{"path": ""}], MEAN),
    "a path that is no text": ([{"type": STEPS + "Pooling", "path": 1}], MEAN),
    "no pooling": (steps("Transformer"), MEAN),
    "another order": (steps("Pooling", "Transformer"), MEAN),
    "another module": (steps("Transformer", "Pooling", "Dense", "Normalize"), MEAN),
    "a path outside": (steps("Transformer", "Pooling", path="../1_Pooling"), MEAN),
    "no configuration": (steps("Transformer", "Pooling"), None),
    "a configuration that is a list": (steps("Transformer", "Pooling"), []),
    "two poolings": (steps("Transformer", "Pooling"), {**MEAN, "pooling_mode_cls_token": True}),
    "another pooling": (steps("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}),
    "no mode": (steps("Transformer", "Pooling"), {}),
    "a key twice": (steps("Transformer", "Pooling"), '{"pooling_mode": "cls", "pooling_mode": "mean"}'),
    "too large": (steps("Transformer", "Pooling"), " " * MAX_BYTES + "{}"),
}


@pytest.mark.parametrize("case", BAD)
def test_other_files_are_refused(tmp_path: Path, case: str) -> None:
    modules, pooling = BAD[case]
    with pytest.raises(AdapterRejected) as refused:
        directory_pooling(write(tmp_path, modules, pooling))
    assert refused.value.code == "unsupported_pooling"
    assert str(tmp_path) in str(refused.value)


def test_a_push_makes_a_file_that_says_the_same(tmp_path: Path) -> None:
    assert pooling_file(tmp_path) == {}
    write(tmp_path, steps("Transformer", "Pooling"), MEAN)
    [(name, content)] = pooling_file(tmp_path).items()
    assert name == "pooling.json"
    assert parse_pooling(content) == Pooling("mean", is_normalized=False)
    (tmp_path / name).write_bytes(b'{"pooling": "cls"}')
    assert pooling_file(tmp_path) == {}
    assert parse_pooling((tmp_path / name).read_bytes()) == Pooling("cls", is_normalized=True)
