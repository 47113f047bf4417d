"""What an event says, as text."""

from __future__ import annotations

import json

from loramux.admin.client.client import Document


def event_text(event: Document) -> str:
    """Describe an event in a few words, without its type and its adapter. Types unknown here are shown as JSON."""
    data = event["data"]
    match event["type"]:
        case "version.ready":
            return f"version {data['version']}"
        case "version.rejected":
            return f"version {data['version']}: {(data.get('error') or {}).get('message')}"
        case "alias.moved":
            targets = data["targets"]
            return f"{data['alias']} -> " + ", ".join(
                f"version {number}" + (f" ({weight})" if len(targets) > 1 else "") for number, weight in targets.items()
            )
        case "canary.failed":
            return f"{data['alias']}: {data['verdict']}"
        case "budget.threshold":
            return f"{data['metric']} of {data['subject_id']}: {data['percent']} % of {data['limit']}"
        case "adapter.loaded" | "adapter.evicted" | "adapter.struck":
            return f"version {data['version']} on {data['server']}"
    return json.dumps(data, ensure_ascii=False)
