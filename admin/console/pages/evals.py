"""Evals of an adapter's versions: starting one, and the graded answers side by side."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from loramux.admin.console.visit import Visit

PAGE = 50


async def show_list(visit: Visit) -> Response:
    adapter_id = visit.param("adapter_id")
    adapter, versions, page = await asyncio.gather(
        visit.rest.get(f"/adapters/{adapter_id}"),
        visit.rest.get(f"/adapters/{adapter_id}/versions", limit=PAGE),
        visit.rest.get(f"/adapters/{adapter_id}/evals", limit=PAGE, after=visit.query("after")),
    )
    ready = [version["number"] for version in versions["data"] if version["state"] == "ready"]
    chosen = visit.query("version") or (str(ready[0]) if ready else "")
    return visit.page("evals.html", adapter=adapter, evals=page, ready=ready, chosen=chosen)


async def start(visit: Visit) -> Response:
    adapter_id, form = visit.param("adapter_id"), visit.form
    number = form.integer("version", "the version")
    body = {
        "name": form.text("name") or "console.jsonl",
        "file": form.text("lines").replace("\r\n", "\n"),
        "compare": form.optional_integer("compare", "the other version"),
        "judge": form.optional("judge"),
        "share_base_cache": form.optional_integer("share_base_cache", "the number of tokens"),
    }
    made = await visit.rest.post(f"/adapters/{adapter_id}/versions/{number}/evals", body)
    return visit.done("The eval is queued.", f"/adapters/{adapter_id}/evals/{made['id']}")


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
