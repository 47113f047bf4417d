"""`loramux bench`: measure an OpenAI API under load."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from loramux.admin.commands.inference.bench_options import (
    AnswerTokens,
    Burstiness,
    Compared,
    Concurrency,
    DatasetFile,
    Endpoint,
    ExtraBody,
    IgnoreEos,
    Models,
    NumRequests,
    Objectives,
    OutFile,
    PlotFile,
    PromptTokens,
    Rate,
    Seed,
    Timeout,
    TokenIds,
    TraceFile,
    Zipf,
)
from loramux.admin.commands.inference.openai_options import ApiKey, OpenAIUrl, openai_server
from loramux.admin.commands.options import AsJson
from loramux.admin.commands.output import error_document, fail, print_json, print_table, print_text
from loramux.admin.commands.progress import counted_progress
from loramux.admin.exit_codes import REFUSED, UNREACHABLE, WRONG_CALL

if TYPE_CHECKING:
    from loramux.admin.bench.results import Result
    from loramux.admin.bench.workload import Run, Workload
    from loramux.admin.client.openai_server import OpenAIServer


def bench(
    model: Models = None,
    url: OpenAIUrl = None,
    api_key: ApiKey = None,
    endpoint: Endpoint = "completions",
    requests: NumRequests = None,
    rate: Rate = None,
    burstiness: Burstiness = 1.0,
    concurrency: Concurrency = None,
    trace: TraceFile = None,
    dataset: DatasetFile = None,
    prompt_tokens: PromptTokens = "128",
    answer_tokens: AnswerTokens = "128",
    token_ids: TokenIds = None,
    zipf: Zipf = 0.0,
    ignore_eos: IgnoreEos = True,
    extra_body: ExtraBody = None,
    seed: Seed = 0,
    timeout: Timeout = 600.0,
    slo: Objectives = None,
    out: OutFile = None,
    plot: PlotFile = None,
    compare: Compared = None,
    as_json: AsJson = False,
) -> None:
    """Measure an OpenAI API under load: times to first token, times between tokens, and throughput.

    Works with any server of the OpenAI API. The definitions of the figures are those of 'vllm bench serve'. The exit
    code is 1 if no request succeeds.
    """
    from loramux.admin.bench.asks import Lengths, WorkloadError
    from loramux.admin.bench.figures import parse_objectives
    from loramux.admin.bench.workload import Workload

    try:
        for path in filter(None, (out, plot)):
            _check_writable(path)
        if compare is not None:
            _compare(compare, plot, as_json)
            return
        if not model:
            raise WorkloadError("name at least one model with --model")
        if math.isnan(timeout):
            raise WorkloadError("--timeout must be a number")
        workload = Workload(
            endpoint=endpoint,
            models=model,
            num_requests=requests,
            requests_s=math.inf if rate is None else rate,
            burstiness=burstiness,
            max_open=concurrency,
            prompt=Lengths.parse(prompt_tokens, "--prompt-tokens"),
            answer=Lengths.parse(answer_tokens, "--answer-tokens"),
            ids=None if token_ids is None else Lengths.parse(token_ids, "--token-ids"),
            dataset=dataset,
            trace=trace,
            zipf=zipf,
            seed=seed,
            more={**({"ignore_eos": True} if ignore_eos else {}), **_extra(extra_body)},
        )
        objectives = parse_objectives(slo or ())
        server = openai_server(url, api_key, as_json)
        run = _run(server, workload, timeout, as_json)
        _report(run, workload, objectives, (out, plot), as_json)
    except WorkloadError as error:
        fail(str(error), WRONG_CALL, error_document(str(error), "wrong_workload") if as_json else None)


def _extra(text: str | None) -> dict[str, Any]:
    from loramux.admin.bench.asks import WorkloadError

    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise WorkloadError("--extra-body is not a JSON object")
    return found


def _run(server: OpenAIServer, workload: Workload, timeout_s: float, as_json: bool) -> Run:
    from loramux.admin.bench.workload import TrialFailed, run_workload

    with ExitStack() as stack:

        def progress(total: int) -> Callable[[int], None]:
            return stack.enter_context(counted_progress(total, "requests", as_json))

        try:
            return run_workload(server, workload, timeout_s, progress)
        except TrialFailed as failed:
            message = f"{server.url}: {failed}"
            if "ignore_eos" in str(failed):
                message += ": try --no-ignore-eos"
            code = "server_unreachable" if failed.is_unreachable else "request_failed"
            exit_code = UNREACHABLE if failed.is_unreachable else REFUSED
            fail(message, exit_code, error_document(message, code) if as_json else None)


def _report(
    run: Run,
    workload: Workload,
    objectives: dict[str, float],
    files: tuple[Path | None, Path | None],
    as_json: bool,
) -> None:
    from loramux.admin.bench.figures import measure
    from loramux.admin.bench.results import Conditions, Result, result_document, summary_document
    from loramux.admin.bench.tables import STATISTICS, error_rows, time_rows, total_rows, warnings_of

    figures = measure(run.answers, run.seconds, objectives)
    conditions = Conditions(
        endpoint=workload.endpoint,
        models=workload.models,
        requests_s=workload.requests_s,
        burstiness=workload.burstiness,
        max_open=workload.max_open,
    )
    now = datetime.now()
    summary = summary_document(figures, conditions, len(run.answers), now)
    # What makes the figures doubtful comes before the figures.
    for warning in warnings_of(figures):
        print_text(f"warning: {warning}", file=sys.stderr)
    if as_json:
        print_json(summary)
    else:
        print_table(("", ""), total_rows(summary))
        print_text()
        print_table(("", *STATISTICS), time_rows(figures))
        if figures.failed:
            print_text()
            print_table(("requests", "error"), error_rows(run.answers))
    # A file that cannot be written must not cost the figures.
    out, plot = files
    if out is not None:
        _write(out, json.dumps(result_document(figures, run.answers, conditions, now)))
    if plot is not None:
        name = out.stem if out is not None else workload.models[0]
        _draw(plot, [Result(name, workload.models[0], summary["date"], summary)])
    if figures.completed == 0:
        raise typer.Exit(REFUSED)


def _compare(paths: tuple[Path, Path], plot: Path | None, as_json: bool) -> None:
    from loramux.admin.bench.results import read_result
    from loramux.admin.bench.tables import compared_rows

    one, other = (read_result(path) for path in paths)
    if plot is not None:
        _draw(plot, [one, other])
    rows = compared_rows(one, other)
    if as_json:
        data = [dict(zip(("figure", "first", "second", "ratio"), row, strict=True)) for row in rows]
        print_json({"object": "list", "data": data})
        return
    print_table(
        ("", f"1: {one.name}", f"2: {other.name}", "2 / 1"),
        [("model", one.model, other.model, ""), ("date", one.date, other.date, ""), *rows],
    )


def _draw(path: Path, results: Sequence[Result]) -> None:
    from loramux.admin.bench.tables import draw_times

    _write(path, draw_times(results, "Times of requests"))


def _check_writable(path: Path) -> None:
    from loramux.admin.bench.asks import WorkloadError
    from loramux.admin.commands.written_files import check_writable

    try:
        check_writable(path)
    except OSError as error:
        raise WorkloadError(f"{path} cannot be written: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}", REFUSED)
