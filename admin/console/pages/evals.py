"""Evals of an adapter's versions: starting one, and the graded answers side by side."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from loramux.admin.console.rest_calls import Document, RestError
from loramux.admin.console.visit import Visit, refusal_text
from loramux.platform.errors import ApiError

PAGE = 50
MAX_FORM_BYTES = 192 * 1024
"""Largest form that starts an eval. Browsers send three bytes for most bytes that are not letters or digits, so this is
enough for 60 KB of any text.
"""


async def show_list(visit: Visit, status: int = 200, problem: str | None = None) -> Response:
    """The evals, and the form that starts one. After a problem, the form is as it was sent."""
    adapter_id = visit.param("adapter_id")
    adapter, versions, page = await asyncio.gather(
        visit.rest.get(f"/adapters/{adapter_id}"),
        visit.rest.get(f"/adapters/{adapter_id}/versions", limit=PAGE),
        visit.rest.get(f"/adapters/{adapter_id}/evals", limit=PAGE, after=visit.query("after")),
    )
    ready = [version["number"] for version in versions["data"] if version["state"] == "ready"]
    chosen = visit.form.text("version") or visit.query("version") or (ready[0] if ready else "")
    return visit.page(
        "evals.html",
        status,
        adapter=adapter,
        evals=page,
        has_versions=bool(versions["data"]),
        ready=ready,
        chosen=chosen,
        problem=problem,
        # An eval of a tenant is charged to a key, and a single sign-on has none.
        has_key=visit.is_platform or visit.session.content.sign_on is None,
    )


async def start(visit: Visit) -> Response:
    try:
        made = await _started(visit)
    except (RestError, ApiError) as error:
        # A redirect would lose the lines in the form.
        return await show_list(visit, error.status, refusal_text(error))
    return visit.done("The eval is queued.", f"/adapters/{made['adapter_id']}/evals/{made['id']}")


async def _started(visit: Visit) -> Document:
    adapter_id, form = visit.param("adapter_id"), visit.form
    number = form.integer("version", "the version")
    body = {
        "name": form.text("name") or "console.jsonl",
        "file": form.text("lines").replace("\r\n", "\n"),
        "compare": form.optional_integer("compare", "the other version"),
        "judge": form.optional("judge"),
        "share_base_cache": form.optional_integer("share_base_cache", "the number of tokens"),
    }
    return await visit.post_once(f"/adapters/{adapter_id}/versions/{number}/evals", body)


async def show(visit: Visit) -> Response:
    """One eval. The answers of both versions, or of both forms of one, to a line are in one row."""
    found, after = await _find(visit), visit.query("after_line")
    path = f"/evals/{found['id']}/answers"
    adapter, answers = await asyncio.gather(
        visit.rest.get(f"/adapters/{found['adapter_id']}"), visit.rest.get(path, limit=PAGE, after_line=after)
    )
    lines: dict[int, dict[str, Any]] = {}
    for answer in answers["data"]:
        lines.setdefault(answer["line"], {})[_side(answer["version"], answer["shared"])] = answer
    sides = [_side(found["version"])]
    if found["compare"] is not None:
        sides.append(_side(found["compare"]))
    if found["share_base_cache"] is not None:
        sides.append(_side(found["version"], is_shared=True))
    template = "eval_state.html" if visit.is_partial else "eval.html"
    return visit.page(
        template, adapter=adapter, eval=found, lines=lines, sides=sides, has_more=answers["has_more"], after=after
    )


def _side(version: int, is_shared: bool = False) -> str:
    return f"Version {version}{', sharing' if is_shared else ''}"


async def cancel(visit: Visit) -> Response:
    found = await _find(visit)
    await visit.rest.post(f"/evals/{found['id']}/cancel")
    return visit.done("The eval is cancelled. Its answers so far are kept.", _here(found))


async def _find(visit: Visit) -> dict[str, Any]:
    return await visit.rest.get(f"/evals/{visit.param('eval_id')}")


def _here(found: dict[str, Any]) -> str:
    return f"/adapters/{found['adapter_id']}/evals/{found['id']}"
