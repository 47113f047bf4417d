"""Load generators with their default settings: every request must succeed, and each must count our tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harnesses.finding import Finding
from tests.harnesses.tools import INSIDE, STAND_IN, run_tool
from tests.strangers.stand import Served

NUM_REQUESTS = 20


def guidellm(served: Served, scratch: Path) -> Iterator[Finding]:
    """A sweep over synchronous, throughput and constant rates, as in guidellm's own quick start."""
    command = ["guidellm", "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={served.url},api_key={served.key}"]
    command += ["--profile", "kind=sweep", "--constraint", "kind=max_duration,seconds=4"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={served.folder}"]
    run_tool("guidellm", command, scratch)
    report = json.loads((scratch / "benchmarks.json").read_text())
    for benchmark in report["benchmarks"]:
        totals = benchmark["metrics"]["request_totals"]
        name = f"{benchmark['config']['strategy']['type_']}"
        is_right = totals["successful"] > 0 and totals["errored"] == 0
        found = f"{totals['successful']} succeeded, {totals['errored']} failed"
        yield Finding("guidellm", name, found, "all succeed", is_right)


def aiperf(served: Served, scratch: Path) -> Iterator[Finding]:
    # aiperf takes a tokenizer's directory only as a relative path, and only if the hub is not declared unreachable.
    (scratch / "tokenizer").symlink_to(served.folder)
    for kind in ("chat", "completions"):
        command = [
            "aiperf",
            "profile",
            "--model",
            served.adapter,
            "--endpoint-type",
            kind,
            "--streaming",
            "--ui",
            "none",
        ]
        command += ["--tokenizer", "tokenizer", "--url", served.url, "--api-key", served.key]
        command += ["--request-count", str(NUM_REQUESTS), "--artifact-dir", f"aiperf-{kind}"]
        run_tool("aiperf", command, scratch, is_offline=False)
        (path,) = (scratch / f"aiperf-{kind}").rglob("profile_export_aiperf.json")
        report = json.loads(path.read_text())
        count = int(report["request_count"]["avg"])
        errors = sum(int(error["count"]) for error in report.get("error_summary") or [])
        is_right = (count, errors) == (NUM_REQUESTS, 0)
        yield Finding("aiperf", kind, f"{count} succeeded, {errors} failed", f"{NUM_REQUESTS} succeed", is_right)


def vllm_bench(served: Served, files: Path, scratch: Path) -> Iterator[Finding]:
    """`vllm bench serve`, on completions and chat, with two models that it draws from as adapters."""
    for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        command = ["python", str(INSIDE / "vllm_bench.py"), "--backend", backend, "--endpoint", path]
        command += ["--base-url", served.url, "--header", f"Authorization=Bearer {served.key}"]
        command += [
            "--model",
            served.model,
            "--tokenizer",
            served.folder,
            "--lora-modules",
            served.model,
            served.adapter,
        ]
        command += ["--num-prompts", str(NUM_REQUESTS), "--random-input-len", "64", "--random-output-len", "16"]
        command += ["--save-result", "--result-filename", f"{backend}.json", "--disable-tqdm"]
        run_tool("vllm", command, scratch, paths=(STAND_IN, files))
        report: dict[str, Any] = json.loads((scratch / f"{backend}.json").read_text())
        found = f"{report['completed']} of {NUM_REQUESTS}, {report['total_output_tokens']} tokens"
        is_right = (report["completed"], report["total_output_tokens"]) == (NUM_REQUESTS, 16 * NUM_REQUESTS)
        yield Finding("vllm bench", backend, found, f"{NUM_REQUESTS}, {16 * NUM_REQUESTS} tokens", is_right)
