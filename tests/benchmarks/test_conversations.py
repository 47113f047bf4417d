"""The benchmark of conversations writes its figures, but none if an answer differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import conversations, harness, random_model
from benchmarks.answers import CheckError
from benchmarks.conversations import DISK, WITH, WITHOUT, Conversations, main, measure
from benchmarks.random_model import Shape


@pytest.mark.campaign
def test_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "require_idle", lambda is_allowed: 0.5)
    monkeypatch.setattr(conversations, "SCRATCH", tmp_path)
    monkeypatch.setitem(random_model.SHAPES, "small", Shape(64, 2, 4, 2, 128, 1000))
    out = tmp_path / "conversations.json"
    assert main(["--first", "200", "--turns", "4", "--threads", "1", "--out", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["ways"][WITH]["cached_share"] > figures["ways"][WITHOUT]["cached_share"]
    assert figures["host_pages"]["restored_tokens"] > 0


@pytest.mark.campaign
def test_a_disk_behind_a_small_host_memory_saves_more_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "require_idle", lambda is_allowed: 0.5)
    monkeypatch.setattr(conversations, "SCRATCH", tmp_path)
    monkeypatch.setitem(random_model.SHAPES, "small", Shape(64, 2, 4, 2, 128, 1000))
    out = tmp_path / "conversations.json"
    assert main(["--first", "200", "--turns", "4", "--threads", "1", "--host", "0.4", "--out", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["ways"][DISK]["cached_share"] > figures["ways"][WITH]["cached_share"]
    assert figures["disk_pages"]["read_tokens"] > 0


def test_a_conversation_grows_by_messages_and_answers() -> None:
    talk = Conversations(2, 100, (6, 3, 2))
    first = talk.request(0)
    assert (len(first.prompt), first.max_tokens) == (6, 2)
    talk.note_answer(0, [7, 8])
    second, other = talk.request(0), talk.request(1)
    assert second.prompt[:8] == (*first.prompt, 7, 8)
    assert (len(second.prompt), len(other.prompt)) == (11, 6)
    assert first.isolation_key == second.isolation_key != other.isolation_key


def test_a_different_answer_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(engine: Any, add: Any) -> tuple[float, list[int], int]:
        return 1.0, [engine], 0

    monkeypatch.setattr(conversations, "answer", answer)
    engines: Any = {WITH: 1, WITHOUT: 2}
    with pytest.raises(CheckError, match="the answers differ"):
        measure(engines, Conversations(1, 100, (6, 3, 2)), 1)
