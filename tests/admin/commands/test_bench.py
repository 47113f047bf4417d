"""`loramux bench` against a gateway of ours, and against servers that fail."""

from __future__ import annotations

import errno
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.admin.byte_server import byte_server, events
from tests.admin.command_line import invoke, printed_json
from tests.admin.scripted_gateway import MODEL, Gateway, open_gateway

SMALL = ("--prompt-tokens", "8-24", "--answer-tokens", "2-6", "--requests", 12)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, demo_base: Path) -> Iterator[Gateway]:
    with open_gateway(tmp_path_factory.mktemp("gateway"), demo_base) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
def environment(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gateway.variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_load_is_measured_written_drawn_and_compared(endpoint: str, tmp_path: Path) -> None:
    out, plot = tmp_path / "a.json", tmp_path / "a.svg"
    objectives = ("--slo", "ttft:60000 tpot:60000")
    arguments = (*SMALL, "--endpoint", endpoint, "--rate", 500, *objectives, "--out", out, "--plot", plot)
    done = invoke("bench", "--model", MODEL, *arguments)
    assert done.exit_code == 0, done.output
    assert "requests completed" in done.stdout
    assert "first token, ms" in done.stdout
    assert "warning" not in done.stderr
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"], result["request_rate"]) == (12, 0, 500.0)
    assert result["request_goodput"] == pytest.approx(12 / result["duration"])
    assert all(2 <= length <= 6 for length in result["output_lens"])
    assert result["total_output_tokens"] == sum(result["output_lens"])
    assert len(set(result["input_lens"])) > 1
    ElementTree.fromstring(plot.read_text())
    compared = printed_json(invoke("bench", "--compare", out, out, "--plot", plot, "--json"))
    assert {row["ratio"] for row in compared["data"]} == {"1.000", "-"}
    assert "2 / 1" in invoke("bench", "--compare", out, out).stdout


def test_prompts_of_token_ids_have_exactly_the_wanted_length(gateway: Gateway) -> None:
    arguments = ("--model", MODEL, "--prompt-tokens", 9, "--answer-tokens", 3, "--token-ids", "300-700")
    result = printed_json(invoke("bench", *arguments, "--requests", 4, "--concurrency", 2, "--json"))
    assert (result["total_input_tokens"], result["total_output_tokens"], result["max_concurrency"]) == (36, 12, 2)
    assert "input_lens" not in result
    assert all(300 <= token <= 700 for token in gateway.engine.adds[-1].prompt)


def test_words_become_about_as_many_tokens_as_wanted() -> None:
    result = printed_json(
        invoke("bench", "--model", MODEL, "--prompt-tokens", 100, "--answer-tokens", 1, "--requests", 20, "--json")
    )
    assert result["total_input_tokens"] / 20 == pytest.approx(100, rel=0.15)


def test_failed_requests_are_counted_and_shown(tmp_path: Path) -> None:
    dataset = tmp_path / "data.jsonl"
    dataset.write_text(f'{{"prompt": "hi"}}\n{{"prompt": "hi", "model": "unknown"}}\n{{"prompt": "{"x " * 5000}"}}\n')
    done = invoke("bench", "--model", MODEL, "--dataset", dataset, "--answer-tokens", 2)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith(("requests completed", "requests failed"))] == [
        "1",
        "2",
    ]
    assert "'unknown'" in done.stdout


def test_answers_of_other_lengths_are_told_before_the_figures() -> None:
    with byte_server([events('{"choices": [{"text": "a"}]}')]) as server:
        done = invoke("bench", "--model", "m", "--url", server.url, "--requests", 3, "--answer-tokens", 9)
    assert done.exit_code == 0
    assert "3 of 3 answers do not have the requested number of tokens" in done.stderr
    assert "no usage" in done.stderr


def test_a_run_in_which_all_requests_fail_exits_with_1() -> None:
    # Only the trial request succeeds.
    with byte_server([events('{"choices": [{"text": "a"}]}')], num_connections=1) as server:
        done = invoke("bench", "--model", "m", "--url", server.url, "--requests", 2, "--token-ids", "1-2")
    assert done.exit_code == 1
    assert "requests failed" in done.stdout


def refused(exit_code: int, *arguments: object, **options: Any) -> str:
    done = invoke("bench", *arguments, **options)
    assert done.exit_code == exit_code, done.output
    assert done.stdout == ""
    document = json.loads(invoke("bench", *arguments, "--json", **options).stdout)
    assert f"loramux: {document['error']['message']}" == done.stderr.rstrip("\n")
    return done.stderr


def test_refusals_are_explained(tmp_path: Path) -> None:
    assert "name at least one model" in refused(2)
    assert "--prompt-tokens" in refused(2, "--model", MODEL, "--prompt-tokens", "many")
    assert "--extra-body" in refused(2, "--model", MODEL, "--extra-body", "[]")
    assert "--slo" in refused(2, "--model", MODEL, "--slo", "fast")
    assert "cannot be read" in refused(2, "--model", MODEL, "--trace", tmp_path / "none")
    assert "cannot be read" in refused(2, "--compare", tmp_path / "none", tmp_path / "none")
    nowhere = tmp_path / "none" / "file"
    outputs = (("--out", nowhere), ("--plot", nowhere), ("--out", tmp_path))
    for arguments in (*outputs, ("--compare", "a", "b", "--plot", nowhere)):
        assert "cannot be written" in refused(2, "--model", "unknown", *arguments)
    assert "'unknown'" in refused(1, "--model", "unknown", "--out", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    assert "API key" in refused(1, "--model", MODEL, "--api-key", "sk-lmx-wrong")
    assert "refused" in refused(3, "--model", MODEL, "--url", "http://127.0.0.1:9/v1").lower()
    without = {"OPENAI_BASE_URL": None, "OPENAI_API_KEY": None}
    assert "OPENAI_BASE_URL" in refused(3, "--model", MODEL, env=without)


def test_figures_are_shown_even_if_a_file_can_no_longer_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    done = invoke("bench", "--model", MODEL, *SMALL, "--out", tmp_path / "a.json")
    assert (done.exit_code, "requests completed" in done.stdout) == (1, True)
    assert "a.json cannot be written: No space left on device" in done.stderr


def test_a_server_that_does_not_know_ignore_eos_is_explained() -> None:
    body = b'{"error": {"message": "Unrecognized request argument: ignore_eos"}}'
    response = b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with byte_server([response]) as server:
        assert "try --no-ignore-eos" in refused(1, "--model", "m", "--url", server.url)


def test_ctrl_c_ends_a_load_with_130() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        command = [sys.executable, "-m", "loramux.admin.cli", "bench", "--model", "m", "--url", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
            connection, _ = silent.accept()
            connection.recv(1)
            bench.send_signal(signal.SIGINT)
            printed, said = bench.communicate(timeout=60)
            connection.close()
    assert (bench.returncode, printed) == (130, "")
    assert len(said.strip().splitlines()) == 1
