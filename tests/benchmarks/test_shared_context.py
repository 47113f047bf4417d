"""The benchmarks of shared contexts write their figures, but none if an answer depends on the cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import harness, random_model, shared_context, shared_quality
from benchmarks.answers import Answer, CheckError
from benchmarks.random_model import Shape
from benchmarks.shared_context import ACTIVATED, INVOCATION, OWN, SHARED, make_prompts, measure, requests
from loramux.engine.sequences.activation import activation

DEMO = Path(__file__).parents[2] / "admin" / "demo"


class FakeAdapter:
    packed = SimpleNamespace(digest="a")

    def __init__(self, is_activated: bool) -> None:
        self._tokens = INVOCATION if is_activated else ()

    def activation(self, prompt: Sequence[int]) -> int | None:
        return activation(prompt, self._tokens) if self._tokens else 0


def test_prompts_differ_only_in_their_questions() -> None:
    prompts = make_prompts(100, 6, 3, 50)
    assert len({prompt[:94] for prompt in prompts}) == 1
    assert len({prompt[94:] for prompt in prompts}) == 3
    assert all((len(prompt), prompt[92:94]) == (100, INVOCATION) for prompt in prompts)


@pytest.mark.parametrize(("way", "start"), [(OWN, 0), (SHARED, 84), (ACTIVATED, 92)])
def test_each_way_applies_the_adapter_from_another_position(way: str, start: int) -> None:
    adapters: Any = [FakeAdapter(way == ACTIVATED)] * 2
    adds = requests(way, make_prompts(100, 6, 2, 50), adapters, num_own=16)
    assert [add.activation for add in adds] == [start, start]
    assert adds[0].isolation_key == adds[1].isolation_key != b""


def test_an_answer_that_depends_on_the_cache_stops_the_benchmark() -> None:
    def answer(asked: Sequence[Any]) -> dict[str, Answer]:
        return {add.sequence_id: Answer([bool(add.isolation_key)], []) for add in asked}

    stats = SimpleNamespace(num_prefix_pages=1, page_bytes=1)
    engine: Any = SimpleNamespace(
        load=list, answer=answer, prefill=list, finish=list, stats=lambda: stats, num_sequences=0
    )
    adapters: Any = [FakeAdapter(False)] * 2
    with pytest.raises(CheckError, match="depends on the prefix cache"):
        measure(engine, requests(SHARED, make_prompts(100, 6, 2, 50), adapters, num_own=16))


@pytest.mark.campaign
def test_prefixes_are_shared_and_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "require_idle", lambda is_allowed: 0.5)
    monkeypatch.setattr(shared_context, "SCRATCH", tmp_path)
    monkeypatch.setitem(random_model.SHAPES, "tiny", Shape(64, 2, 4, 2, 128, 1000))
    out = tmp_path / "figures.json"
    arguments = ["--tokens", "800", "--adapters", "4", "--own", "80", "--threads", "1", "--out", str(out)]
    assert shared_context.main(arguments) == 0
    ways = json.loads(out.read_text())["ways"]
    assert ways[OWN]["bytes_share"] == 1
    # Each of the four has at most 80 tokens and its answer for itself.
    assert 0.25 < ways[ACTIVATED]["bytes_share"] <= ways[SHARED]["bytes_share"] < 0.4


@pytest.mark.campaign
def test_predictions_differ_more_the_less_the_adapter_reads(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    arguments = ["--model", str(DEMO / "base"), "--name", "demo", "--adapter", str(DEMO / "adapters" / "formal")]
    options = ["--prompts", "1", "--context", "40", "--own", "1000", "6", "2", "--threads", "1", "--out", str(out)]
    assert shared_quality.main([*arguments, *options]) == 0
    rows = {row["own"]: row for row in json.loads(out.read_text())["options"]}
    assert list(rows) == ["1000", "6", "2", "base"]
    assert rows["1000"]["kl"] == rows["1000"]["kl_eval"] == 0
    assert 0 < rows["6"]["kl"] < rows["2"]["kl"] < rows["base"]["kl"]
    for row in rows.values():
        assert 0.7 * row["kl"] <= row["kl_eval"] <= 1.01 * row["kl"]
