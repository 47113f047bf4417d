"""Anthropic's form of `/v1/models` (https://platform.claude.com/docs/en/api/models-list)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import QueryParams

from loramux.platform.errors import InvalidRequest

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000
"""Most models per page."""


def model_document(name: str, created_s: int, max_model_len: int) -> dict[str, Any]:
    created_at = datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created_at,
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def model_page(models: Sequence[dict[str, Any]], query: QueryParams) -> dict[str, Any]:
    """Return the page of `models` that the query's `limit`, `after_id` and `before_id` ask for.

    Raises InvalidRequest for a limit out of range, for both cursors, and for a cursor that names no model.
    """
    limit, after, before = _limit(query.get("limit")), query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise InvalidRequest("after_id and before_id exclude each other", param="before_id")
    if before is not None:
        end = _place(models, before, "before_id")
        start = max(0, end - limit)
        has_more = start > 0
    else:
        start = 0 if after is None else _place(models, after, "after_id") + 1
        end = start + limit
        has_more = end < len(models)
    data = list(models[start:end])
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": has_more, "first_id": first, "last_id": last}


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    # Count the digits first, so that a number with thousands of digits is not parsed.
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequest(f"limit must be from 1 to {MAX_LIMIT}", param="limit")
    return int(text)


def _place(models: Sequence[dict[str, Any]], name: str, param: str) -> int:
    for index, model in enumerate(models):
        if model["id"] == name:
            return index
    raise InvalidRequest(f"{param} names no model of the list", param=param)
