"""Results in the JSON format of `vllm bench serve`, written and read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from loramux.admin.bench.answers import Answer
from loramux.admin.bench.asks import CHAT, WorkloadError
from loramux.admin.bench.figures import Figures
from loramux.admin.client.safe_text import safe_text

MAX_FILE_BYTES = 1 << 30
MAX_TEXT = 200

SHOWN: Mapping[str, str] = {
    "completed": "requests completed",
    "failed": "requests failed",
    "duration": "duration, s",
    "request_throughput": "requests/s",
    "request_goodput": "goodput, requests/s",
    "output_throughput": "answer tokens/s",
    "total_token_throughput": "all tokens/s",
}
"""The figures of a result that are not times, by their names in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a load was, for its result file."""

    endpoint: str
    models: Sequence[str]
    requests_s: float
    """Infinite if requests are sent as soon as `max_open` allows."""
    burstiness: float
    max_open: int | None


def result_document(
    figures: Figures, answers: Sequence[Answer], conditions: Conditions, now: datetime
) -> dict[str, Any]:
    """Return the whole result. Times of single requests are in seconds, and statistics in milliseconds."""
    return {**summary_document(figures, conditions, len(answers), now), **_details(answers)}


def summary_document(figures: Figures, conditions: Conditions, num_requests: int, now: datetime) -> dict[str, Any]:
    """Return the result without lists of single requests."""
    backend = "openai-chat" if conditions.endpoint == CHAT else "openai"
    document = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": conditions.models[0],
        "tokenizer_id": None,
        "models": list(conditions.models),
        "num_prompts": num_requests,
        "request_rate": conditions.requests_s if math.isfinite(conditions.requests_s) else "inf",
        "burstiness": conditions.burstiness if math.isfinite(conditions.burstiness) else "inf",
        "max_concurrency": conditions.max_open,
        "duration": figures.duration_s,
        "completed": figures.completed,
        "failed": figures.failed,
        "num_other_lengths": figures.num_other_lengths,
        "total_input_tokens": figures.num_prompt_tokens,
        "total_output_tokens": figures.num_answer_tokens,
        "request_throughput": figures.requests_s,
        "request_goodput": figures.goodput_s,
        "output_throughput": figures.answer_tokens_s,
        "total_token_throughput": figures.tokens_s,
    }
    for name, spread in figures.spreads.items():
        document |= {
            f"mean_{name}_ms": spread.mean,
            f"median_{name}_ms": spread.percentiles[50],
            f"std_{name}_ms": spread.std,
            **{f"p{percentile}_{name}_ms": value for percentile, value in spread.percentiles.items()},
        }
    return document


def _details(answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "input_lens": [answer.num_prompt for answer in answers],
        "output_lens": [answer.num_tokens if answer.error is None else 0 for answer in answers],
        "ttfts": [answer.first_token_s if answer.times_s else 0.0 for answer in answers],
        "itls": [answer.gaps_s for answer in answers],
        "start_times": [answer.received.sent_s for answer in answers],
        "latencies": [answer.latency_s if answer.times_s else 0.0 for answer in answers],
        "request_models": [answer.received.ask.model for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }


@dataclass(frozen=True, slots=True)
class Result:
    """A result that was read from a file."""

    name: str
    model: str
    date: str
    figures: Mapping[str, float]
    """The figures of the file that are finite numbers, by name."""


def read_result(path: Path) -> Result:
    """Read a file of `loramux bench` or `vllm bench serve`. Raises WorkloadError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise WorkloadError(f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB")
        document = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WorkloadError(f"{path} is not a JSON file: {error}") from None
    if not isinstance(document, dict):
        raise WorkloadError(f"{path} is not a result of a benchmark")
    figures = {name: float(value) for name, value in document.items() if _is_figure(value)}
    if not {"completed", "duration", "request_throughput"} <= figures.keys():
        raise WorkloadError(f"{path} is not a result of 'loramux bench' or 'vllm bench serve'")
    shown = [safe_text(str(document.get(name, "-")))[:MAX_TEXT] for name in ("model_id", "date")]
    return Result(safe_text(path.stem)[:MAX_TEXT], shown[0], shown[1], figures)


def _is_figure(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -(2**53) <= value <= 2**53
