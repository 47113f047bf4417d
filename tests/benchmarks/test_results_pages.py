"""The pages of results say what the result files say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (RESULTS / "README.md").read_text()
HEADLINES = (ROOT / "benchmarks" / "README.md").read_text()
LARGEST_IDLE_SHARE = 0.05


def file_named(name: str) -> Path | None:
    found = (RESULTS / f"{prefix}{name}.json" for prefix in ("", "s_lora-"))
    return next((path for path in found if path.exists()), None)


def rows_of_files() -> list[tuple[Path, str, str]]:
    """Each file in a table of the page, with the cell of its commit and the whole row."""
    found = []
    for row in re.findall(r"^\| `.*$", PAGE, re.MULTILINE):
        cell, commits = row.split("|")[1:3]
        first, *others = re.findall(r"`([^`]+)`", cell)
        names = [first, *(first + other if other.startswith("-") else other for other in others)]
        all_commits = commits.split(",") if commits.count(",") == len(names) - 1 else [commits] * len(names)
        found += [
            (path, commit.strip(), row)
            for name, commit in zip(names, all_commits, strict=True)
            if (path := file_named(name)) is not None
        ]
    return found


ROWS = rows_of_files()


def test_each_result_file_is_listed() -> None:
    assert {path.name for path in RESULTS.glob("*.json")} == {path.name for path, _, _ in ROWS}


@pytest.mark.parametrize(("path", "commit", "row"), ROWS, ids=[path.stem for path, _, _ in ROWS])
def test_commit_and_load_are_those_of_the_file(path: Path, commit: str, row: str) -> None:
    document = json.loads(path.read_text())
    recorded = document.get("machine", {}).get("commit", "")
    # A rebase renames a commit, and a file that is written before its commit names the one before.
    if recorded and re.match("[0-9a-f]{7}", commit) and "name the commit" not in row and "names the commit" not in row:
        hexadecimal, plus, changes = recorded.partition("+")
        assert hexadecimal.startswith(commit.partition("+")[0])
        assert commit.partition("+")[1:] == (plus, changes)
    shares = document.get("busy_share", document.get("busy_share_before", 0))
    largest = max(shares.values(), default=0) if isinstance(shares, dict) else shares
    if largest > LARGEST_IDLE_SHARE:
        assert re.search("busy|other programs", row)


@dataclass(frozen=True, slots=True)
class Quoted:
    benchmark: str
    words: str
    """A part of the row's result, with the places of the figures."""
    file: str
    figures: Callable[[Any], Sequence[float]]


def p99_ratio(document: Any, figure: str, part: str, whole: str) -> float:
    return float(document["figures"][part][figure]["p99_ms"] / document["figures"][whole][figure]["p99_ms"])


GAPS = "between_resident_tokens"
QUOTED = (
    Quoted(
        "gateway", "{:,.0f}, {:,.0f} and {:.1f} ms", "gateway-avx512", lambda one: [g["value"] for g in one["goals"]]
    ),
    Quoted(
        "push",
        "engine on one of two cores: p99 {:.2f} s; {:.2f}x",
        "push-small-one-thread-amx",
        lambda one: [one["push_to_first_token_s"]["p99"], one["gap_p99_ratio"]["median"]],
    ),
    Quoted(
        "push",
        "1,001 pushes, one every 1.05 s: p99 {:.2f} s; {:.2f}x",
        "push-small-1001-one-thread-amx",
        lambda one: [one["push_to_first_token_s"]["p99"], one["gap_p99_ratio"]["median"]],
    ),
    Quoted(
        "push",
        "On both cores, every 3 s: {:.2f} s; {:.2f}x, missed",
        "push-small-amx",
        lambda one: [one["push_to_first_token_s"]["p99"], one["gap_p99_ratio"]["median"]],
    ),
    Quoted(
        "batches",
        "SmolLM2-135M: {:.2f}x as the median of rounds that have few requests, {:.2f}x for the slowest of all; {:.2f}",
        "batches-smollm2-amx",
        lambda one: [
            one["ttft_p99_ratio"]["median"],
            one["ttft_p99_ratio"]["together"],
            one["throughput_share"]["share"],
        ],
    ),
    Quoted(
        "batches",
        "{:.2f}x, missed; {:.2f}",
        "batches-tiny",
        lambda one: [one["ttft_p99_ratio"]["median"], one["throughput_share"]["share"]],
    ),
    *(
        Quoted(
            "streams",
            words,
            f"streams-{model}-{bits}-{cpu}",
            lambda one: [one["ratios"]["one stream"], one["ratios"]["all streams"]],
        )
        for model, bits, cpu, words in (
            ("smollm2", "int8", "amx", "8 and 4 bits. AMX: {:.2f}x and {:.2f}x"),
            ("smollm2", "int4", "amx", "{:.2f}x and {:.2f}x, adapters 0.81 and 0.75 (missed) on SmolLM2"),
            ("1b", "int8", "amx", "(missed) on SmolLM2; {:.2f}x and {:.2f}x"),
            ("1b", "int4", "amx", "{:.2f}x and {:.2f}x, adapters 0.95 and 1.04 on 1B"),
            ("smollm2", "int8", "avx2", "AVX2 without VNNI: {:.2f}x and {:.2f}x"),
            ("smollm2", "int4", "avx2", "{:.2f}x and {:.2f}x, adapters 0.92 and 0.94 on SmolLM2"),
            ("1b", "int8", "avx2", "0.94 on SmolLM2; {:.2f}x and {:.2f}x"),
            ("1b", "int4", "avx2", "{:.2f}x and {:.2f}x, adapters 0.97 on 1B"),
        )
    ),
    Quoted(
        "structured-output",
        "{:.2f}, {:.2f}x and {:.0f} ms",
        "structured_output-1b-avx512",
        lambda one: [one["values"]["every row"], one["values"]["over vLLM"], 1000 * one["values"]["first use"]],
    ),
    *(
        Quoted(
            "s-lora",
            f"{{:.3f}} at {'alpha ' if alpha == 0.005 else ''}{alpha}",
            f"s_lora-alpha{alpha}-pair-avx512",
            lambda one: [one["cases"][-1]["throughput"]["over_fewest_by_round"]],
        )
        for alpha in (0.005, 0.01)
    ),
    Quoted(
        "flood",
        "{:.2f} and {:.2f}",
        "flood-avx512",
        lambda one: [p99_ratio(one, "ttft", "flood", crowd) for crowd in ("full crowd", "calm crowd")],
    ),
    Quoted(
        "cold-storm",
        "{:.2f} and {:.2f};",
        "cold_storm-avx512",
        lambda one: [p99_ratio(one, GAPS, "loads", "quiet"), p99_ratio(one, GAPS, "storm", "warm")],
    ),
    Quoted(
        "speculation",
        "SmolLM2-135M: {:.2f}x and {:.2f}x; {:.2f}x; {:.2f}x",
        "speculation-smollm2-avx512",
        lambda one: [one["cases"][kind]["speedup"] for kind in ("copy", "prediction", "chat", "sixteen chats")],
    ),
    Quoted(
        "speculation",
        "schemas {:.2f}x and {:.2f}x (missed)",
        "speculation-schemas-smollm2-avx512",
        lambda one: [one["cases"][kind]["speedup"] for kind in ("schema", "sixteen schemas")],
    ),
    Quoted("conversations", "small model, six tenants: {:.2f}", "conversations-small-amx", lambda one: [one["ratio"]]),
    Quoted("conversations", "tiny model, 200 tenants: {:.2f}", "conversations-tiny-amx", lambda one: [one["ratio"]]),
    Quoted(
        "shared-context",
        "{:.2f} and {:.2f}; activated adapters {:.2f} and {:.2f}",
        "shared_context-tiny-avx512",
        lambda one: [
            one["ways"][way][figure]
            for way in ("share_base_cache", "activated")
            for figure in ("bytes_share", "largest_share_of_first")
        ],
    ),
    Quoted("simulation", "{:,}; ", "simulation", lambda one: [one["results"]["at once"]["steps_per_s_median"]]),
)


@pytest.mark.parametrize("quoted", QUOTED, ids=lambda quoted: f"{quoted.benchmark} {quoted.file}")
def test_headline_quotes_the_file(quoted: Quoted) -> None:
    (row,) = re.findall(rf"^\| `{quoted.benchmark}` .*$", HEADLINES, re.MULTILINE)
    figures = quoted.figures(json.loads((RESULTS / f"{quoted.file}.json").read_text()))
    assert quoted.words.format(*figures) in row


def test_no_result_names_a_directory_of_its_machine() -> None:
    texts = {path.name: path.read_text() for path in RESULTS.glob("*.json")}
    assert len(texts) > 50
    assert [name for name, text in texts.items() if re.search(r'"/(root|home|work)/', text)] == []
