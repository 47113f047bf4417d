from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import QueryParams

from loramux.platform.errors import InvalidRequest
from loramux.platform.messages_api.model_list import model_document, model_page

MODELS: list[dict[str, Any]] = [{"id": name} for name in "abcde"]


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ("", "abcde", False),
        ("limit=2", "ab", True),
        ("limit=2&after_id=b", "cd", True),
        ("limit=2&after_id=c", "de", False),
        ("after_id=e", "", False),
        ("limit=2&before_id=d", "bc", True),
        ("limit=3&before_id=d", "abc", False),
        ("before_id=a", "", False),
    ],
)
def test_pages_are_as_the_query_asks(query: str, ids: str, has_more: bool) -> None:
    page = model_page(MODELS, QueryParams(query))
    assert ("".join(one["id"] for one in page["data"]), page["has_more"]) == (ids, has_more)
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "limit=x", "limit=" + "9" * 5000, "limit=٣", "after_id=z", "after_id=a&before_id=b"],
)
def test_bad_queries_are_refused(query: str) -> None:
    with pytest.raises(InvalidRequest):
        model_page(MODELS, QueryParams(query))


def test_a_model_has_anthropics_fields() -> None:
    assert model_document("acme/support", 1_700_000_000, 4096) == {
        "type": "model",
        "id": "acme/support",
        "display_name": "acme/support",
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": 4096,
        "max_tokens": 4096,
    }
