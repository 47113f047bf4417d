from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from loramux.admin.bench.answers import Answer
from loramux.admin.bench.asks import Ask, WorkloadError
from loramux.admin.bench.figures import measure, parse_objectives
from loramux.admin.bench.load import Received
from loramux.admin.bench.results import Conditions, read_result, result_document
from loramux.admin.bench.tables import compared_rows, draw_times, error_rows, warnings_of

NOW = datetime(2026, 1, 2, 3, 4, 5)
CONDITIONS = Conditions(endpoint="chat", models=["m"], requests_s=float("inf"), burstiness=1.0, max_open=None)


def answer(times_s: tuple[float, ...], num_tokens: int, error: str | None = None, wanted: int | None = None) -> Answer:
    ask = Ask(model="m", prompt="", num_tokens=wanted)
    return Answer(
        received=Received(ask, 0.0, sent_s=10.0), times_s=times_s, num_prompt=5, num_tokens=num_tokens,
        is_counted=True, text="t", error=error,
    )  # fmt: skip


ANSWERS = [
    answer((10.1, 10.2, 10.4), 4, wanted=4),
    answer((10.3,), 1, wanted=2),
    answer((), 0, error="the server returned 500"),
]


def test_figures_follow_their_definitions() -> None:
    figures = measure(ANSWERS, 2.0, {"ttft": 200.0, "tpot": 100.01})
    assert (figures.completed, figures.failed, figures.num_good) == (2, 1, 1)
    assert (figures.num_prompt_tokens, figures.num_answer_tokens, figures.tokens_s) == (10, 5, 7.5)
    assert (figures.requests_s, figures.answer_tokens_s, figures.goodput_s) == (1.0, 2.5, 0.5)
    assert figures.spreads["ttft"].mean == pytest.approx(200.0)
    # (400 - 100) ms for three tokens. The other answer has no second token.
    assert figures.spreads["tpot"].percentiles[50] == pytest.approx(100.0)
    assert figures.spreads["itl"].percentiles[99] == pytest.approx(199.0)
    assert figures.spreads["e2el"].mean == pytest.approx(350.0)
    assert warnings_of(figures) == ["1 of 2 answers do not have the requested number of tokens"]
    assert error_rows(ANSWERS) == [(1, "the server returned 500")]


def test_a_load_without_answers_has_figures() -> None:
    figures = measure([ANSWERS[2]], 1.0, {})
    assert (figures.completed, figures.requests_s, figures.goodput_s, figures.spreads["itl"].mean) == (0, 0, None, 0)


def test_objectives_are_read_as_vllm_writes_them() -> None:
    assert parse_objectives(["ttft:200 tpot:50", "e2el:1e3"]) == {"ttft": 200.0, "tpot": 50.0, "e2el": 1000.0}


@pytest.mark.parametrize("text", ["ttft", "itl:5", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf"])
def test_objectives_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(WorkloadError, match="--slo"):
        parse_objectives([text])


def test_a_result_has_vllms_fields() -> None:
    figures = measure(ANSWERS, 2.0, {})
    document = result_document(figures, ANSWERS, CONDITIONS, NOW)
    named = {"date": "20260102-030405", "backend": "openai-chat", "model_id": "m", "num_prompts": 3, "duration": 2.0}
    named |= {"request_rate": "inf", "burstiness": 1.0, "max_concurrency": None, "completed": 2, "failed": 1}
    named |= {"total_input_tokens": 10, "total_output_tokens": 5, "request_throughput": 1.0}
    named |= {"output_throughput": 2.5, "total_token_throughput": 7.5, "request_goodput": None}
    assert document.items() >= named.items()
    statistics = {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")}
    assert document.keys() >= statistics
    assert document["output_lens"] == [4, 1, 0]
    assert [len(gaps) for gaps in document["itls"]] == [2, 0, 0]
    assert document["errors"] == ["", "", "the server returned 500"]
    json.dumps(document, allow_nan=False)


def test_results_of_both_programs_are_compared(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    document = result_document(measure(ANSWERS, 2.0, {}), ANSWERS, CONDITIONS, NOW)
    ours.write_text(json.dumps(document))
    # As vLLM writes it: with other fields, and without our percentiles.
    vllm = {name: value for name, value in document.items() if not name.startswith(("p50", "p90"))}
    theirs.write_text(json.dumps({**vllm, "model_id": "\x1b[31mred", "request_throughput": 2.0, "rtfx": 0.0}))
    one, other = read_result(ours), read_result(theirs)
    rows = {str(row[0]): row[1:] for row in compared_rows(one, other)}
    assert rows["requests/s"] == ("1", "2", "2.000")
    assert rows["first token, p50, ms"][2] == "1.000"
    assert "first token, p90, ms" not in rows
    assert other.model == "\ufffd[31mred"
    picture = draw_times([one, other], "<times>")
    assert "&lt;times&gt;" in picture
    assert picture.count("first token") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a JSON file"),
        (b"\xff", "not a JSON file"),
        (b"[" * 100_000, "not a JSON file"),
        (b"[]", "not a result"),
        (b'{"completed": true, "duration": 1, "request_throughput": 1}', "not a result"),
        (b'{"completed": 1, "duration": 1e300, "request_throughput": 1}', "not a result"),
    ],
)
def test_files_that_are_no_results_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(WorkloadError, match=said):
        read_result(file)
