from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest

from loramux.admin.bench.arrivals import arrival_times
from loramux.admin.bench.asks import CHAT, COMPLETIONS, Lengths, PromptScale, RandomPrompts, WorkloadError, zipf_models
from loramux.admin.bench.files import read_dataset, read_trace
from loramux.admin.bench.workload import Workload

FOUR = Lengths(4, 4)


def workload(**options: object) -> Workload:
    given = {"endpoint": COMPLETIONS, "models": ["a", "b"], "num_requests": None, "prompt": FOUR, "answer": FOUR}
    return Workload(**{**given, "more": {}, **options})


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5), (math.inf, 0.0)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float, spread: float) -> None:
    times = arrival_times(20_000, 50.0, burstiness, random.Random(0))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert times[-1] == pytest.approx(400.0)
    assert min(gaps) >= 0
    # The coefficient of variation of a gamma distribution is the inverse root of its shape.
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, abs=0.05)


def test_without_a_rate_all_requests_are_due_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, random.Random(0)) == [0.0] * 3


def test_models_are_drawn_by_zipfs_law() -> None:
    drawn = Counter(itertools.islice(zipf_models(["a", "b", "c"], 1.0, random.Random(0)), 11_000))
    assert [drawn[name] / 11_000 for name in "abc"] == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.02)
    even = Counter(itertools.islice(zipf_models(["a", "b"], 0.0, random.Random(0)), 10_000))
    assert even["a"] / 10_000 == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("text", ["", "-", "5-", "a", "9-5", "-5", "1e3", "1" * 20, "²"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    if text == "5-":
        assert Lengths.parse(text, "--x") == Lengths(5, 5)
        return
    with pytest.raises(WorkloadError, match="--x"):
        Lengths.parse(text, "--x")


def test_prompts_have_the_wanted_number_of_tokens() -> None:
    scale = PromptScale.of((10, 35), (50, 115))
    assert (scale.per_word, scale.fixed) == (2.0, 15.0)
    words = RandomPrompts(scale=scale).draw(215, random.Random(0))
    assert isinstance(words, str)
    assert len(words.split()) == 100
    ids = RandomPrompts(ids=Lengths(7, 9)).draw(50, random.Random(0))
    assert (len(ids), set(ids)) == (50, {7, 8, 9})
    # A server that reports no usage gives no scale.
    assert PromptScale.of((10, 0), (50, 0)) == PromptScale()


def test_a_load_is_the_same_for_the_same_seed_only() -> None:
    assert workload(seed=1).due(PromptScale()) == workload(seed=1).due(PromptScale())
    assert workload(seed=1).due(PromptScale()) != workload(seed=2).due(PromptScale())
    assert len(workload().due(PromptScale())) == 100


def test_a_dataset_has_prompts_or_messages(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "hi", "output_tokens": 3}\n\n{"prompt": [1, 2], "max_tokens": 5, "model": "c"}\n')
    due = workload(dataset=file, num_requests=3).due(PromptScale())
    asks = [ask for _, ask in due]
    assert [(ask.prompt, ask.num_tokens) for ask in asks] == [("hi", 3), ((1, 2), 5), ("hi", 3)]
    assert asks[1].model == "c"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    ((_, ask),) = workload(dataset=file, endpoint=CHAT).due(PromptScale())
    assert ask.body(CHAT)["messages"] == ({"role": "user", "content": "hi"},)
    assert ask.num_tokens == 4


def test_a_trace_says_when_requests_are_sent(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 1500, "input_length": 3, "output_length": 7, "hash_ids": [1]}\n'
        '{"timestamp": 1000.5, "input_length": 2, "output_length": 5, "model": "c"}\n'
    )
    due = workload(trace=file, ids=Lengths(1, 9)).due(PromptScale())
    assert [(at_s, len(ask.prompt), ask.num_tokens) for at_s, ask in due] == [(0.0, 2, 5), (0.4995, 3, 7)]
    assert due[0][1].model == "c"


@pytest.mark.parametrize(
    ("kind", "content", "said"),
    [
        ("dataset", b"", "no requests"),
        ("dataset", b"{}", "line 1: it needs either"),
        ("dataset", b'{"prompt": "a"}\n{"prompt": 5}', "line 2"),
        ("dataset", b'{"prompt": "a", "max_tokens": 0}', "a length must be"),
        ("dataset", b'{"prompt": "a", "max_tokens": 99999999999}', "a length must be"),
        ("dataset", b'{"messages": []}', "need --endpoint chat"),
        ("dataset", b'{"prompt": "\xff"}', "line 1"),
        ("dataset", b"[" * 100_000, "line 1"),
        ("trace", b'{"timestamp": -1, "input_length": 1, "output_length": 1}', "milliseconds from 0"),
        ("trace", b'{"timestamp": 1, "input_length": 0, "output_length": 1}', "a length must be"),
        ("trace", b'{"timestamp": 1}', "line 1"),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path: Path, kind: str, content: bytes, said: str) -> None:
    file, dice = tmp_path / "file", random.Random(0)
    file.write_bytes(content)
    read = {
        "dataset": lambda: read_dataset(file, COMPLETIONS, FOUR, itertools.repeat("a"), dice),
        "trace": lambda: read_trace(file, RandomPrompts(), itertools.repeat("a"), dice),
    }
    with pytest.raises(WorkloadError, match=said):
        read[kind]()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trace": Path("t"), "dataset": Path("d")}, "either"),
        ({"trace": Path("t"), "requests_s": 1.0}, "leave --rate out"),
        ({"ids": FOUR, "endpoint": CHAT}, "--token-ids"),
        ({"answer": Lengths(0, 4)}, "at least 1"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        workload(**options).check()
