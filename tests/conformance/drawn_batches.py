"""Batches of drawn requests beside the other load of the gateways' campaign."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from sqlalchemy import func, select, update

from loramux.migrations import schema
from loramux.platform.generation.generation import PredictionUsage
from tests.conformance.drawn_requests import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, DrawnRequest, RequestDraw
from tests.conformance.gateway_lab import GatewayLab, Truth

ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)
PATIENCE_S = 240.0
FINAL = ("completed", "cancelled")
NOT_IN_BATCHES = ("stream", "stream_options", "background")


@dataclass(frozen=True)
class DrawnBatches:
    """All batches of a tenant, by identifier, with the requests of their lines. A gateway runs one at a time."""

    lab: GatewayLab
    tenant_id: str
    key: str
    requests: dict[str, Sequence[DrawnRequest]] = field(default_factory=dict)
    answered: dict[str, Truth] = field(default_factory=dict)
    """The usage in the answers, by the request's identifier, once the batches have ended."""
    predicted: dict[str, PredictionUsage] = field(default_factory=dict)
    """What the usage in the answers says about predictions."""

    def __str__(self) -> str:
        return f"{len(self.answered)} of {sum(map(len, self.requests.values()))} lines of batches answered"

    @property
    def num_tokens(self) -> int:
        return sum(truth.prompt_tokens + truth.completion_tokens for truth in self.answered.values())

    def start(self, requests: Sequence[DrawnRequest]) -> None:
        lines = [
            {"custom_id": str(number), "method": "POST", "url": request.path, "body": request.body}
            for number, request in enumerate(requests)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines)
        file = self._call("POST", "files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
        asked = {"input_file_id": file.json()["id"], "endpoint": requests[0].path, "completion_window": "24h"}
        self.requests[self._call("POST", "batches", json=asked).json()["id"]] = requests

    def start_drawn(self, draw: RequestDraw, max_tokens: int, num_lines: int) -> None:
        """Start as many batches as there are gateways."""
        for _ in self.lab.gateways:
            self.start(drawn_lines(draw, max_tokens, num_lines))

    def cancel(self) -> None:
        """Cancel the batches once their lines are known, because one that is cancelled before has no answers."""
        deadline_s = time.monotonic() + PATIENCE_S
        for batch_id in self.requests:
            while (found := self._call("GET", f"batches/{batch_id}").json())["status"] == "validating":
                assert time.monotonic() < deadline_s, found
                time.sleep(0.1)
            # 409: it has just ended.
            self._call("POST", f"batches/{batch_id}/cancel", accepted=(200, 409))

    def expire_claims(self) -> None:
        """Let any server continue the batches at once, as if the leases of the dead ones were over."""
        with self.lab.database.write() as connection:
            connection.execute(update(schema.batches).values(claim_expires_us=0))

    def finish(self, final: Sequence[str] = ("completed",)) -> None:
        """Wait until the batches end, and check that each line has one answer."""
        deadline_s = time.monotonic() + PATIENCE_S
        for batch_id, requests in self.requests.items():
            while (found := self._call("GET", f"batches/{batch_id}").json())["status"] not in FINAL:
                assert found["status"] not in ("failed", "expired"), found
                assert time.monotonic() < deadline_s, found
                time.sleep(0.1)
            assert found["status"] in final, found
            numbers = [
                *self._read(found["output_file_id"], requests, is_output=True),
                *self._read(found["error_file_id"], requests, is_output=False),
            ]
            assert sorted(numbers) == list(range(len(requests))), "each line is answered once"

    def _read(self, file_id: str | None, requests: Sequence[DrawnRequest], *, is_output: bool) -> Iterator[int]:
        """Check the answers in a file, and yield the numbers of their lines."""
        if file_id is None:
            return
        for answer in map(json.loads, self._call("GET", f"files/{file_id}/content").text.splitlines()):
            number, response = int(answer["custom_id"]), answer["response"]
            yield number
            if response is None:
                assert (is_output, answer["error"]["code"]) == (False, "batch_cancelled"), answer
                continue
            assert response["status_code"] == (200 if is_output else 400), (requests[number], answer)
            assert requests[number].is_refused != is_output, (requests[number], answer)
            if is_output:
                usage = response["body"]["usage"]
                self.answered[response["request_id"]] = _told(usage)
                details = usage.get("completion_tokens_details", {})
                if "accepted_prediction_tokens" in details:
                    self.predicted[response["request_id"]] = PredictionUsage(
                        details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
                    )

    def check(self) -> None:
        """Check that exactly the answers are charged. No request may be open."""
        events, adjustments = schema.usage_events.c, schema.usage_adjustments.c
        tokens = ("prompt_tokens", "completion_tokens")
        own = select(events.request_id, *(events[name] for name in tokens))
        own = own.where(events.tenant_id == self.tenant_id, events.endpoint == "batches")
        sums = select(adjustments.request_id, *(func.sum(adjustments[name]) for name in tokens))
        sums = sums.where(adjustments.tenant_id == self.tenant_id).group_by(adjustments.request_id)
        with self.lab.database.read() as connection:
            charged = {row[0]: Truth(row[1], row[2]) for row in connection.execute(own)}
            corrected = {row[0]: (int(row[1]), int(row[2])) for row in connection.execute(sums)}
        for request_id in charged.keys() & corrected:
            before, (num_prompt, num_completion) = charged[request_id], corrected[request_id]
            charged[request_id] = Truth(before.prompt_tokens + num_prompt, before.completion_tokens + num_completion)
        assert {request_id: paid for request_id, paid in charged.items() if paid != Truth(0, 0)} == self.answered
        self.lab.check_predictions(self.tenant_id, self.predicted)

    def _call(self, method: str, path: str, accepted: Sequence[int] = (200,), **options: Any) -> httpx.Response:
        url = f"http://127.0.0.1:{self.lab.gateways[0].port}/v1/{path}"
        headers = {"authorization": f"Bearer {self.key}"}
        with httpx.Client(trust_env=False, timeout=30, headers=headers) as client:
            response = client.request(method, url, **options)
        assert response.status_code in accepted, response.text
        return response


def as_line(request: DrawnRequest) -> DrawnRequest:
    """Return the same request without the fields that a line must not have."""
    body = {name: value for name, value in request.body.items() if name not in NOT_IN_BATCHES}
    return DrawnRequest(request.kind, request.path, body, request.is_refused)


def drawn_lines(draw: RequestDraw, max_tokens: int, num_lines: int) -> list[DrawnRequest]:
    """Draw the requests of a batch, which all have the path of the first."""
    lines: list[DrawnRequest] = []
    while len(lines) < num_lines:
        drawn = draw.draw(max_tokens)
        if drawn.path in ENDPOINTS if not lines else drawn.path == lines[0].path:
            lines.append(as_line(drawn))
    return lines


def _told(usage: dict[str, Any]) -> Truth:
    if "input_tokens" in usage:
        return Truth(usage["input_tokens"], usage["output_tokens"])
    return Truth(usage["prompt_tokens"], usage.get("completion_tokens", 0))
