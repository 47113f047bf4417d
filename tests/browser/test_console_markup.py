"""Markup in answers and free texts is shown as text: a browser runs none of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.adapter_store.waiting import wait_until
from tests.browser.console_tab import Tab
from tests.browser.running_demo import Demo

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]

IMAGE = "<img src=x onerror=window.ran=1>"
ANSWERS = {
    "script": "<script>window.ran=1</script>",
    "image": IMAGE,
    "svg": "<svg/onload=window.ran=1><animate onbegin=window.ran=1>",
    "frame": "<iframe srcdoc='<script>parent.ran=1</script>'></iframe>",
    "closing tags": "</span></output></textarea></template></script><script>window.ran=1</script>",
    "markdown": "[click](javascript:window.ran=1) ![x](https://example.com/x.png) <javascript:window.ran=1>",
    "templates": "{{ 7 * 7 }} ${window.ran=1} {% raw %} #{7*7} <%= 7*7 %>",
    "htmx": "<div hx-get='/console/logout' hx-trigger='load' hx-on::load='window.ran=1'></div>",
    "entities": "&lt;b&gt; &#60;script&#62; &amp;",
    "event stream": "\n\ndata: [DONE]\n\ndata: {}\n\nevent: message",
    "directions": "\u202eright to left\u2066\u2067\u200b\u2028\u2029",
    "control characters": "\x00\x07\x1b[2J\x7f\r\n",
    "a long line": "<i>" + "x" * 600,
}
"""Texts that a schema forces the model to answer."""

FOUND = "document.querySelectorAll('main script, main img, main iframe, [onerror], [onload], [hx-get*=logout]')"


def check_nothing_ran(page: Any) -> None:
    assert page.evaluate("window.ran") is None
    assert page.evaluate(f"{FOUND}.length") == 0


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_with_markup_are_shown_as_text(tab: Tab, name: str) -> None:
    page = tab.open("/playground?tenant=harbour")
    page.evaluate("for (const hidden of document.querySelectorAll('details')) hidden.open = true")
    page.fill("[name=json_schema]", json.dumps({"const": ANSWERS[name]}))
    page.fill("[name=max_tokens]", "900")
    page.click("[data-run]")
    page.wait_for_selector(".lane [data-figures]:has-text('first token')", timeout=300_000)
    shown = page.locator(".lane output").first
    assert json.loads(shown.evaluate("element => element.textContent")) == ANSWERS[name]
    assert shown.evaluate("element => [...element.querySelectorAll('*')].every(one => one.localName === 'span')")
    check_nothing_ran(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1440


def test_arguments_of_calls_with_markup_are_shown_as_text(tab: Tab) -> None:
    page = tab.open("/playground?tenant=harbour")
    page.evaluate("for (const hidden of document.querySelectorAll('details')) hidden.open = true")
    answer = {"type": "object", "properties": {IMAGE: {"const": ANSWERS["closing tags"]}}, "required": [IMAGE]}
    page.fill("[name=json_schema]", json.dumps({**answer, "additionalProperties": False}))
    page.fill("[name=max_tokens]", "512")
    page.click("[data-run]")
    page.wait_for_selector(".lane [data-figures]:has-text('first token')", timeout=120_000)
    assert IMAGE in page.locator(".lane output").first.evaluate("element => element.textContent")
    check_nothing_ran(page)


def test_error_messages_with_markup_are_shown_as_text(tab: Tab) -> None:
    page = tab.open("/playground?tenant=harbour")
    page.locator(".lane [name=model]").first.fill(IMAGE)
    page.click("[data-run]")
    page.wait_for_selector(".lane [data-figures]:has-text('Failed')")
    assert IMAGE in page.locator(".lane [data-figures]").first.inner_text()
    check_nothing_ran(page)


def test_free_texts_with_markup_are_shown_as_text(tab: Tab, demo: Demo) -> None:
    """Names of keys and tenants, end users, user agents, and reports about uploads are free text."""
    marked = ANSWERS["closing tags"] + IMAGE
    demo.client.post("api_keys", {"tenant": "harbour", "name": marked[:60]})
    assert demo.ask("harbour", "pirate", max_tokens=2, user=IMAGE).status_code == 200
    headers = {"authorization": f"Bearer {demo.server.admin_key}", "user-agent": IMAGE}
    with httpx.Client(trust_env=False, timeout=60, headers=headers, base_url=demo.server.admin_url) as http:
        made = http.post("/admin/v1/tenants", json={"slug": "marked", "display_name": IMAGE})
        assert made.status_code == 201, made.text
        refused = http.post("/admin/v1/adapters", json={"tenant": "harbour", "name": IMAGE})
        assert refused.status_code in (400, 422), refused.text
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [IMAGE, "q_proj"], "bias": IMAGE}
        weights = b"\x02\x00\x00\x00\x00\x00\x00\x00{}"
        adapter = http.post("/admin/v1/adapters", json={"tenant": "harbour", "name": "marked"}).json()
        files = {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": weights}
        number = push(http, adapter["id"], files)
        version = f"/admin/v1/adapters/{adapter['id']}/versions/{number}"
        wait_until(lambda: http.get(version).json()["state"] == "rejected", timeout_s=60)
    pages = {
        "/keys?tenant=harbour": "demo",
        "/usage?group_by=end_user&tenant=harbour": "",
        "/audit": "tenant.create",
        "/tenants": "harbour",
        "/jobs?state=failed": "marked",
        f"/adapters/{adapter['id']}/versions/{number}": "Version",
        f"/keys?tenant={IMAGE}": "",
        f"/usage?group_by={IMAGE}": "",
        f"/adapters?search={IMAGE}": "",
    }
    for path, text in pages.items():
        page = tab.open(path)
        assert text in page.locator("body").inner_text(), path
        check_nothing_ran(page)


def push(http: httpx.Client, adapter_id: str, files: dict[str, bytes]) -> int:
    from hashlib import sha256

    declared = [{"name": name, "size": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()]
    base = f"/admin/v1/adapters/{adapter_id}"
    upload = http.post(f"{base}/uploads", json={"files": declared})
    assert upload.status_code == 201, upload.text
    for name, data in files.items():
        sent = http.put(f"{base}/uploads/{upload.json()['id']}/files/{name}", content=data)
        assert sent.status_code < 300, sent.text
    version = http.post(f"{base}/versions", json={"upload_id": upload.json()["id"]})
    assert version.status_code == 202, version.text
    return int(version.json()["number"])
