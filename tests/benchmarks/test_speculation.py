"""The benchmark of drafts writes its figures, but none if an answer differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, random_model, speculation
from benchmarks.answers import CheckError
from benchmarks.random_model import Shape
from benchmarks.speculation import Work, changed, main, measure_kind


@pytest.mark.campaign
def test_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "require_idle", lambda is_allowed: 0.5)
    monkeypatch.setattr(speculation, "SCRATCH", tmp_path)
    monkeypatch.setitem(random_model.SHAPES, "small", Shape(64, 2, 4, 2, 128, 1000))
    out = tmp_path / "speculation.json"
    assert main(["--size", "small", "--tokens", "24", "--rounds", "2", "--threads", "1", "--out", str(out)]) == 0
    cases = json.loads(out.read_text())["cases"]
    # A random model has no tokenizer.
    assert list(cases) == ["prediction", "chat", "four chats", "sixteen chats"]
    assert 0 < cases["prediction"]["accepted_tokens"] < cases["prediction"]["drafted_tokens"]
    assert all(case["speedup"] > 0 for case in cases.values())


def test_a_different_answer_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(engine: Any, adds: Any) -> tuple[float, dict[str, list[int]]]:
        return 1.0, {"0": [int(adds[0].speculates)]}

    monkeypatch.setattr(speculation, "decode", decode)
    engine: Any = None
    with pytest.raises(CheckError, match="chat: answers differ"):
        measure_kind(engine, Work(None, 100, 4), "chat", 1)


def test_schemas_are_compared_with_answers_without_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {(True, True): 2.0, (True, False): 3.0, (False, False): 5.0}

    def decode(engine: Any, adds: Any) -> tuple[float, dict[str, list[int]]]:
        has_schema = bool(adds[0].grammar)
        return taken[has_schema, adds[0].speculates], {"0": [int(has_schema)]}

    monkeypatch.setattr(speculation, "decode", decode)
    engine: Any = None
    case = measure_kind(engine, Work(None, 100, 4), "schema", 3)
    assert case["speedup"] == 2.5
    assert case["medians_s"] == {"with drafts": 2.0, "without": 5.0, "schema without forced tokens": 3.0}


def test_about_one_token_of_twenty_is_changed() -> None:
    tokens = [5] * 2000
    found = changed(tokens, 1000, 3)
    assert 60 < sum(one != 5 for one in found) < 140
    assert found == changed(tokens, 1000, 3)
