"""Event streams of `/v1/responses` with stable identifiers, and the transcripts that they must equal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.platform.gateways import Gateway

GOLDEN = Path(__file__).parent / "golden"
RESPONSES = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_ID = re.compile(r"(?:resp|msg|rs|fc|ctc)_[0-9a-f]{32,48}")
_SHOWN = ("status", "output", "usage", "incomplete_details", "error")


async def events_of(gateway: Gateway, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each checked against its name and against OpenAI's type."""
    sent = {"model": "base", "input": "Hi", "stream": True, **body}
    response = await gateway.http.post(RESPONSES, json=sent)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def transcript(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace identifiers by numbers, and shorten the response objects."""
    text = "\n".join(json.dumps(_shortened(event)) for event in events)
    names: dict[str, str] = {}
    for found in _ID.findall(text):
        names.setdefault(found, f"{found.partition('_')[0]}_{len(names)}")
    text = _ID.sub(lambda found: names[found.group()], text)
    text = re.sub(r'"call_id": "[0-9a-f]{9}"', '"call_id": "call"', text)
    return [json.loads(line) for line in text.splitlines()]


def _shortened(event: dict[str, Any]) -> dict[str, Any]:
    if "response" not in event:
        return event
    return {**event, "response": {name: event["response"][name] for name in _SHOWN}}


def golden(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / f"{name}.jsonl").read_text().splitlines()]
