from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gateway.__main__ import loads, main
from benchmarks.gateway.clients import Load, Outcome, Received, Script, check_answers, read_answer
from benchmarks.gateway.figures import GOALS, cases_of, earlier_run, figures_of, judged, with_earlier_cases
from benchmarks.peers.system import SystemFailed

SCRIPT = Script((7, 8), ("ab", "c"))
STREAM = Load(num_clients=1, num_tokens=3, is_streamed=True, step_us=0, seconds=1.0)
WHOLE = replace(STREAM, is_streamed=False)


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def streamed(*texts: str, num_tokens: int = 3) -> bytes:
    documents = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    documents.append({"choices": [], "usage": {"completion_tokens": num_tokens}})
    events = [b"data: " + json.dumps(document).encode() + b"\n\n" for document in documents]
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(*events, b"data: [DONE]\n\n")


def outcome(*answers: bytes) -> Outcome:
    return Outcome([Received(0.0, [data], [0.5]) for data in answers], 2.0)


def test_stream_is_read_whatever_its_events_contain() -> None:
    assert read_answer(streamed("ab", "cab"), True) == ("abcab", 3)
    check_answers(outcome(streamed("ab", "cab")), STREAM, SCRIPT)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(streamed("ab", "c"), id="a missing token"),
        pytest.param(streamed("ab", "c", "ab", num_tokens=2), id="wrong usage"),
        pytest.param(streamed("ab", "c", "ab").replace(b"[DONE]", b"[GONE]"), id="no end"),
        pytest.param(b"HTTP/1.1 503 Service Unavailable\r\n\r\n", id="refused"),
    ],
)
def test_wrong_answer_stops_the_benchmark(data: bytes) -> None:
    with pytest.raises(SystemFailed):
        check_answers(outcome(streamed("ab", "c", "ab"), data), STREAM, SCRIPT)


def test_figures_count_tokens_and_gaps() -> None:
    head, _, events = streamed("ab", "cab").partition(b"\r\n\r\n")
    received = Received(1.0, [head + b"\r\n\r\n", events[:90], events[90:]], [1.05, 1.1, 1.3])
    figures = figures_of(Outcome([received], 2.0), STREAM, processor_s=0.5)
    assert (figures.requests_per_s, figures.tokens_per_s, figures.cores) == (0.5, 1.5, 0.25)
    assert (figures.p50_ms, figures.p50_gap_ms) == (pytest.approx(100), pytest.approx(200))
    assert figures.tokens_per_event == 1.0


def test_added_latency_is_the_difference_to_no_gateway() -> None:
    slow, fast = (figures_of(Outcome([Received(0.0, [b""], [seconds])], 1.0), WHOLE, 0.1) for seconds in (0.05, 0.02))
    slow_case, _ = cases_of({("x", "own"): [slow], ("x", "bare"): [fast]}, "bare")
    assert slow_case["added_p50_ms"] == 30.0


def test_every_goal_belongs_to_a_load() -> None:
    assert {goal.load for goal in GOALS} <= loads(1.0).keys()
    cases = [{"load": goal.load, "system": "own", goal.figure: 25.0} for goal in GOALS]
    assert [goal["is_met"] for goal in judged(cases, "own")] == [False, False, True]


def test_runs_of_different_loads_share_a_file(tmp_path: Path) -> None:
    method = {"machine": {"commit": "a"}, "litellm": "none", "database": "sqlite", "rounds": 3, "seconds": 3.0}
    path = tmp_path / "gateway.json"
    assert earlier_run(path, method) is None
    path.write_text(json.dumps(method | {"cases": [{"load": "x", "p50_ms": 1.0}, {"load": "y", "p50_ms": 1.0}]}))
    cases = with_earlier_cases([{"load": "x", "p50_ms": 2.0}], earlier_run(path, method))
    assert cases == [{"load": "x", "p50_ms": 2.0}, {"load": "y", "p50_ms": 1.0}]
    for other in ({"machine": {"commit": "b"}}, {"rounds": 1}):
        with pytest.raises(SystemFailed, match=next(iter(other))):
            earlier_run(path, method | other)


@pytest.mark.campaign
def test_gateway_is_measured_and_its_ledger_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAMUX_PEER_LITELLM", raising=False)
    out = tmp_path / "gateway.json"
    arguments = ("--rounds", "1", "--seconds", "0.3", "--allow-busy", "--scratch", str(tmp_path), "--out", str(out))
    assert main(arguments) == 0
    cases = json.loads(out.read_text())["cases"]
    assert {(case["load"], case["system"]) for case in cases} == {
        (load, system) for load in loads(1.0) for system in ("loramux", "no gateway")
    }
    assert all(case["tokens_per_s"] > 0 for case in cases)
