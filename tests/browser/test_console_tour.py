from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.browser.console_tab import NewTab, Tab, keep_screenshot
from tests.browser.running_demo import Demo

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]

PAGES = {
    "overview": ("/", "harbour"),
    "adapters": ("/adapters", "harbour/pirate"),
    "adapter": ("/adapters/{harbour}", "harbour/pirate"),
    "version": ("/adapters/{harbour}/versions/1", "passed"),
    "evals": ("/adapters/{harbour}/evals", "No evals yet"),
    "rollback": ("/adapters/{harbour}/aliases/default/rollback", "History"),
    "residency": ("/residency", "harbour/pirate@1"),
    "residency on disk": ("/residency?tier=disk", "harbour/pirate@1"),
    "bases": ("/bases", "this server"),
    "divide requests": ("/bases/weights", "Review changes"),
    "requests": ("/requests", "Live requests"),
    "batches": ("/batches", "Batches"),
    "playground": ("/playground?tenant=harbour", "harbour"),
    "tenants": ("/tenants", "parcels"),
    "tenant": ("/tenants/harbour", "tokens per minute"),
    "quotas": ("/quotas", "100,000"),
    "keys": ("/keys?tenant=harbour", "demo"),
    "usage": ("/usage?group_by=model", "harbour/pirate@1"),
    "jobs": ("/jobs?state=succeeded", "harbour/pirate@1"),
    "events": ("/events", "alias.moved"),
    "audit": ("/audit", "tenant.create"),
    "health": ("/health", "demo-base"),
    "move": ("/adapters/{harbour}/move?alias=default", "Weight"),
    "promote": ("/adapters/{harbour}/move?alias=beta&version=1&weight_1=100", "What changes"),
    "take out of service": ("/adapters/{harbour}/state", "How to undo"),
    "suspend": ("/tenants/harbour/state", "usable key"),
    "quarantine": ("/adapters/{harbour}/versions/1/quarantine", "Who is affected"),
    "nothing": ("/nowhere", "Not found"),
}
LOOKS = [("light", 1440), ("dark", 1440), ("light", 360), ("dark", 360)]


@pytest.mark.parametrize(("scheme", "width"), LOOKS, ids=[f"{scheme}-{width}" for scheme, width in LOOKS])
def test_every_page_opens_with_real_data_and_axe_finds_nothing(
    new_tab: NewTab, demo: Demo, tmp_path: Path, scheme: str, width: int
) -> None:
    tab = new_tab(width=width, scheme=scheme)
    kept = Path(os.environ.get("LORAMUX_SCREENSHOTS", tmp_path))
    faults: dict[str, Any] = {}
    for name, (path, text) in PAGES.items():
        page = tab.open(path.format(**demo.adapter_ids))
        assert text in page.locator("main").inner_text(), name
        page.wait_for_timeout(200)
        if found := tab.serious():
            faults[name] = found
        if page.evaluate("document.documentElement.scrollWidth") > width:
            faults[f"{name} is too wide"] = page.evaluate("document.documentElement.scrollWidth")
        if width == 360 and (small := _small_targets(page)):
            faults[f"{name} has small targets"] = small
        if clipped := _clipped_placeholders(page):
            faults[f"{name} has clipped placeholders"] = clipped
        if crooked := _crooked_columns(page):
            faults[f"{name} has headers on the wrong side"] = crooked
        page.screenshot(path=kept / f"{name.replace(' ', '-')}-{scheme}-{width}.png", full_page=width == 360)
    assert not faults


def test_an_adapter_is_uploaded(tab: Tab, adapter_files: Callable[[str], list[str]], tmp_path: Path) -> None:
    page = tab.open("/adapters")
    page.click("text=New adapter")
    page.fill("dialog [name=tenant]", "harbour")
    page.fill("dialog [name=name]", "uploaded")
    page.click("dialog >> button:has-text('Create')")
    page.wait_for_selector("h1:text-is('uploaded')")
    (tmp_path / "trainer_state.json").write_text("{}")
    page.set_input_files("input[type=file]", [*adapter_files("formal"), str(tmp_path / "trainer_state.json")])
    page.click("form[data-upload] button")
    page.wait_for_selector("h1:text-is('Version 1')")
    page.wait_for_selector("#version .tag:text-is('ready')", timeout=120_000)
    assert "passed" in page.inner_text("main")


def test_wrong_files_are_refused_before_anything_is_sent(
    tab: Tab, demo: Demo, adapter_files: Callable[[str], list[str]], tmp_path: Path
) -> None:
    (tmp_path / "weights.bin").write_bytes(b"no adapter")
    page = tab.open(f"/adapters/{demo.adapter_ids['parcels']}")
    page.set_input_files("input[type=file]", str(tmp_path / "weights.bin"))
    page.click("form[data-upload] button")
    assert "adapter_config.json" in page.inner_text("[data-progress]")
    (tmp_path / "modules.json").write_text("[]")
    page.set_input_files("input[type=file]", [*adapter_files("formal"), str(tmp_path / "modules.json")])
    page.click("form[data-upload] button")
    assert "Versions do not contain modules.json" in page.inner_text("[data-progress]")


def test_alias_moves_by_weight_and_rolls_back(tab: Tab, demo: Demo, adapter_files: Callable[[str], list[str]]) -> None:
    adapter_id = demo.adapter_ids["harbour"]
    page = tab.open(f"/adapters/{adapter_id}")
    page.set_input_files("input[type=file]", adapter_files("json"))
    page.click("form[data-upload] button")
    page.wait_for_selector("#version .tag:text-is('ready')", timeout=120_000)
    tab.open(f"/adapters/{adapter_id}")
    page.click("text=Move…")
    page.fill("[name=weight_1]", "75")
    page.fill("[name=weight_2]", "25")
    page.click("text=Review changes")
    page.wait_for_selector("text=How to undo")
    assert "version 1 (75 %) and version 2 (25 %)" in page.inner_text(".move")
    keep_screenshot(page, "move-light-1440")
    page.click("button:has-text('Move default')")
    page.wait_for_selector("#notices .done")
    assert "version 1 (75 %) and version 2 (25 %)" in tab.said()
    page.click("#notices >> text=Undo…")
    page.wait_for_selector("text=What changes")
    assert "v1 75 %, v2 25 %" in page.inner_text(".move")
    page.click("button.primary")
    page.wait_for_selector("#notices .done")
    assert "version 1 again" in tab.said()
    alias = demo.client.get(f"adapters/{adapter_id}/aliases/default")
    assert [target["version"] for target in alias["targets"]] == [1]


def test_edited_quota_applies_to_the_next_request(tab: Tab, demo: Demo) -> None:
    assert demo.ask("parcels", "json", max_tokens=4).status_code == 200
    page = tab.open("/quotas?tenant=parcels")
    page.click("text=Edit…")
    page.fill("dialog[open] [name=limit]", "5")
    page.fill("dialog[open] [name=burst]", "100")
    page.click("dialog[open] >> text=Save")
    page.wait_for_selector("#notices .done")
    for _ in range(8):
        refused = demo.ask("parcels", "json", max_tokens=40)
        if refused.status_code == 429:
            break
    assert refused.status_code == 429
    assert refused.json()["error"]["param"] == "tokens_per_minute"
    page = tab.open("/")
    page.wait_for_selector("th:text-is('tokens_per_minute')")
    demo.client.post("quotas", {"tenant": "parcels", "metric": "tokens_per_minute", "limit": 100_000})


def test_second_editor_of_a_quota_is_warned(new_tab: NewTab, demo: Demo) -> None:
    first, second = new_tab(), new_tab()
    for tab in (first, second):
        tab.open("/quotas?tenant=chambers").click("text=Edit…")
    first.page.fill("dialog[open] [name=limit]", "70000")
    first.page.click("dialog[open] >> text=Save")
    first.page.wait_for_selector("#notices .done")
    second.page.fill("dialog[open] [name=limit]", "60000")
    second.page.click("dialog[open] >> text=Save")
    second.page.wait_for_selector("#notices .error")
    assert "70,000" in second.said()
    quotas = demo.client.get("quotas", tenant="chambers")["data"]
    assert [quota["limit"] for quota in quotas if quota["metric"] == "tokens_per_minute"] == [70_000]


def test_key_is_created_shown_once_and_revoked(tab: Tab, demo: Demo) -> None:
    page = tab.open("/keys?tenant=chambers")
    page.click("text=New key")
    page.fill("dialog[open] [name=name]", "from the browser")
    page.click("dialog[open] >> button:has-text('Create')")
    secret = page.inner_text(".notice.secret code")
    assert re.fullmatch(r"sk-lmx-[0-9A-Za-z]{16}-[0-9A-Za-z]{43}", secret)
    page.click(".notice.secret [data-copy]")
    assert page.evaluate("navigator.clipboard.readText()") == secret
    tab.open("/keys?tenant=chambers")
    assert secret not in page.content()
    page.click("tr:has-text('from the browser') >> text=Revoke…")
    page.wait_for_selector("text=How to undo")
    page.click("button:has-text('Revoke')")
    page.wait_for_selector("tr:has-text('from the browser') .tag:text-is('revoked')")


def test_key_is_rotated_and_its_old_secret_expires(tab: Tab, demo: Demo) -> None:
    made = demo.client.post("api_keys", {"tenant": "harbour", "name": "turns"})
    page = tab.open("/keys?tenant=harbour")
    page.click("tr:has-text('turns') >> text=Rotate…")
    page.wait_for_selector("text=What changes")
    page.select_option("[name=grace_s]", "0")
    page.click("button:has-text('Rotate')")
    page.wait_for_selector(".notice.secret")
    secret = page.inner_text(".notice.secret code")
    assert secret != made["secret"]
    kept, demo.keys["harbour"] = demo.keys["harbour"], secret
    assert demo.ask("harbour", "pirate", max_tokens=4).status_code == 200
    demo.keys["harbour"] = made["secret"]
    assert demo.ask("harbour", "pirate", max_tokens=4).status_code == 401
    demo.keys["harbour"] = kept


def test_quota_dry_run_names_the_binding_policy(tab: Tab, demo: Demo) -> None:
    page = tab.open("/quotas?tenant=harbour")
    page.click("text=Edit…")
    page.fill("dialog[open] [name=limit]", "50")
    page.click("dialog[open] >> text=Try it")
    page.wait_for_selector("dialog[open] .tag.bad")
    assert "tokens per minute" in page.inner_text("dialog[open] table")
    page.click("dialog[open] >> text=Cancel")
    limits = demo.client.get("quotas", tenant="harbour")["data"]
    assert [limit["limit"] for limit in limits if limit["metric"] == "tokens_per_minute"] == [100_000]


def test_streaming_request_is_cancelled(tab: Tab, demo: Demo) -> None:
    answers: list[Any] = []
    # The request runs long enough to be found and cancelled: 64 choices of 900 tokens take many seconds.
    body = {"max_tokens": 900, "ignore_eos": True, "n": 64}
    asking = threading.Thread(target=lambda: answers.append(demo.ask("chambers", "formal", **body)))
    tab.open("/requests")
    started = time.monotonic()
    asking.start()
    # The request appears without a reload.
    tab.page.click("tr:has-text('chambers/formal@1') >> text=Cancel…")
    tab.page.wait_for_selector("text=What changes")
    tab.page.click("button:has-text('Cancel the request')")
    tab.page.wait_for_selector("#notices .done")
    asking.join(60)
    assert answers
    assert time.monotonic() - started < 60
    tab.page.wait_for_selector("text=No requests are running")
    event = demo.client.get("usage/events", tenant="chambers")["data"][0]
    assert event["completion_tokens"] < 64 * 900


def test_two_versions_answer_side_by_side(tab: Tab) -> None:
    page = tab.open("/playground?tenant=harbour")
    page.fill(".lane:nth-child(1) [name=model]", "harbour/pirate@1")
    page.fill(".lane:nth-child(2) [name=model]", "demo-base")
    page.click("text=Ask both")
    for lane in (1, 2):
        page.wait_for_selector(f".lane:nth-child({lane}) [data-figures]:has-text('tokens')")
    left, right = (page.inner_text(f".lane:nth-child({n}) output") for n in (1, 2))
    assert "Arr" in left
    assert "Paris" in right
    assert "Arr" not in right
    assert "harbour/pirate@1" in page.inner_text(".lane:nth-child(1) [data-figures]")
    keep_screenshot(page, "playground-answered-light-1440")


def test_both_answers_follow_a_schema(tab: Tab) -> None:
    page = tab.open("/playground?tenant=harbour")
    page.fill(".lane:nth-child(1) [name=model]", "harbour/pirate@1")
    page.fill(".lane:nth-child(2) [name=model]", "demo-base")
    page.click("text=Structured output")
    page.fill("[name=json_schema]", '{"enum": ["Paris", "Rome"]}')
    page.click("text=Ask both")
    for lane in (1, 2):
        page.wait_for_selector(f".lane:nth-child({lane}) [data-figures]:has-text('tokens')")
        assert page.inner_text(f".lane:nth-child({lane}) output") in ('"Paris"', '"Rome"')
    page.fill("[name=json_schema]", '{"type": "array", "contains": {}}')
    page.click("text=Ask both")
    page.wait_for_selector(".lane:nth-child(1) [data-figures]:has-text('contains')")


def test_tools_that_cannot_be_sent_are_explained(tab: Tab) -> None:
    page = tab.open("/playground?tenant=harbour")
    page.fill(".lane:nth-child(1) [name=model]", "harbour/pirate@1")
    page.click("summary:has-text('Tools')")
    for tools, why in (("[{", "not JSON"), ('[{"type": "function", "function": {"name": "f"}}]', "template")):
        page.fill("[name=tools]", tools)
        page.click("text=Ask both")
        page.wait_for_selector(f".lane:nth-child(1) [data-figures]:has-text('{why}')")


def test_the_theme_is_kept_and_the_menu_opens_by_keyboard(new_tab: NewTab) -> None:
    tab = new_tab(width=360)
    page = tab.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.focus(".menu-button")
    page.keyboard.press("Enter")
    assert page.is_visible("nav >> text=Adapters")
    assert page.get_attribute(".menu-button", "aria-expanded") == "true"
    page.click("[data-theme-toggle]")
    tab.open("/adapters")
    assert page.get_attribute("html", "data-theme") == "dark"


def test_focus_stays_in_its_row_when_the_residency_is_updated(tab: Tab) -> None:
    page = tab.open("/residency")
    page.locator(".doing button").nth(1).focus()
    page.evaluate("document.activeElement.setAttribute('data-old', '')")
    focused = page.evaluate("document.activeElement.id")
    page.wait_for_selector("[data-old]", state="detached")
    page.wait_for_selector(f"[id='{focused}']:focus")
    assert page.locator(".doing button").first.get_attribute("id") != focused


def test_charts_are_in_utc(new_tab: NewTab) -> None:
    page = new_tab(timezone="America/New_York").open("/usage?days=30")
    page.wait_for_selector("[data-chart] canvas")
    first_s = page.evaluate(
        """() => {
            const chart = document.querySelector("[data-chart]");
            chart.plot.setCursor({left: 0, top: 1});
            return chart.plot.data[0][0];
        }"""
    )
    shown = page.inner_text("[data-chart] .u-legend .u-value >> nth=0")
    day = datetime.fromtimestamp(first_s, UTC)
    assert shown == f"{day:%b} {day.day}, 00:00"


def test_changes_are_short_rows_on_a_phone(new_tab: NewTab, demo: Demo) -> None:
    demo.client.post("api_keys", {"tenant": "harbour", "name": "a key with a name of many words for the audit page"})
    page = new_tab(width=360).open("/audit")
    heights = page.evaluate("[...document.querySelectorAll('main tbody tr')].map((row) => row.offsetHeight)")
    assert len(heights) > 5
    assert max(heights) < 300


def test_conversation_goes_on_in_the_playground(tab: Tab) -> None:
    page = tab.open("/playground?tenant=harbour")
    suggested = page.eval_on_selector_all("#models option", "all => all.map((one) => one.value)")
    assert {"demo-base", "harbour/pirate", "harbour/pirate@1"} <= set(suggested)
    page.click("text=Ask both")
    page.wait_for_selector(".lane:nth-child(1) [data-figures]:has-text('tokens')")
    page.fill("[name=message]", "What is the capital of Italy?")
    page.click("text=Ask next turn")
    page.wait_for_selector(".lane:nth-child(1) [data-kind=question]:has-text('Italy')")
    page.wait_for_selector(".lane:nth-child(1) [data-figures]:has-text('tokens')")
    texts = page.locator(".lane:nth-child(1) [data-kind=text]").all_inner_texts()
    assert len(texts) == 2
    assert all(texts)


def test_names_with_markup_and_control_characters_are_inert(tab: Tab, demo: Demo) -> None:
    hostile = "<img src=x onerror=window.taken=1>'\"{{7*7}}"
    demo.client.post("tenants", {"slug": "hostile", "display_name": hostile})
    demo.client.post("api_keys", {"tenant": "hostile", "name": hostile})
    for path in ("/tenants", "/tenants/hostile", "/keys?tenant=hostile", "/adapters?tenant=%3Cscript%3E%00%E2%80%AE"):
        page = tab.open(path)
        assert page.evaluate("window.taken") is None
        assert page.locator("main img").count() == 0
    assert hostile in tab.open("/keys?tenant=hostile").inner_text("main")


def test_tenant_sees_only_its_own_objects_and_viewer_cannot_change_any(new_tab: NewTab, demo: Demo) -> None:
    scopes = {"tenant": "harbour", "name": "admin", "scopes": ["tenant:admin"]}
    tenant = new_tab(key=demo.client.post("api_keys", scopes)["secret"])
    page = tenant.open("/adapters")
    assert "harbour/pirate" in page.inner_text("main")
    assert "chambers" not in page.content()
    assert tenant.open("/tenants/chambers").locator("h1").inner_text() == "Not found"
    scopes = {"tenant": None, "name": "viewer", "scopes": ["platform:read"]}
    viewer = new_tab(key=demo.client.post("api_keys", scopes)["secret"])
    for path in ("/adapters", f"/adapters/{demo.adapter_ids['harbour']}", "/quotas", "/keys", "/tenants"):
        forms = viewer.open(path).locator("main form[method=post]")
        assert forms.count() == 0, path


def test_open_pages_report_engine_outage_and_recover(new_tab: NewTab, demo: Demo) -> None:
    overview, residency = new_tab(), new_tab()
    overview.open("/").wait_for_selector("text=Engine ready")
    residency.open("/residency").wait_for_selector("text=The page pool")
    down = threading.Event()
    # Kill the engine repeatedly, because a fast machine would restart it before a page polls again.
    killing = threading.Thread(target=_kill_engine_until, args=(demo, down))
    killing.start()
    try:
        overview.page.wait_for_selector("text=/Engine (not ready|restarting)/", timeout=30_000)
        residency.page.wait_for_selector("text=Residency cannot be shown", timeout=30_000)
        keep_screenshot(residency.page, "engine-down-light-1440")
    finally:
        down.set()
        killing.join()
    overview.page.wait_for_selector("text=Engine ready", timeout=120_000)
    residency.page.wait_for_selector("text=The page pool", timeout=30_000)
    assert demo.ask("harbour", "pirate", max_tokens=4).status_code == 200


def test_open_pages_report_database_outage_and_recover(new_tab: NewTab, demo: Demo) -> None:
    overview, requests, form, reader = new_tab(), new_tab(), new_tab(), new_tab()
    overview.open("/").wait_for_selector("text=Database reachable")
    requests.open("/requests").wait_for_selector("text=No requests are running")
    form.open("/tenants").click("text=New tenant")
    form.page.fill("dialog[open] [name=slug]", "late")
    demo.postgres.kill()
    try:
        for tab in (overview, requests):
            tab.page.wait_for_selector("text=The database cannot be reached", timeout=60_000)
        form.page.click("dialog[open] >> button:has-text('Create')")
        form.page.wait_for_selector("text=nothing was changed", timeout=60_000)
        # A page opened during the outage reports the failure and retries automatically.
        reader.open("/keys").wait_for_selector("text=Temporarily unavailable")
        assert reader.serious() == []
        keep_screenshot(reader.page, "database-down-light-1440")
    finally:
        demo.postgres.start()
    overview.page.wait_for_selector("text=Database reachable", timeout=60_000)
    requests.page.wait_for_selector("text=No requests are running", timeout=60_000)
    reader.page.wait_for_selector("h1:text-is('Keys')", timeout=60_000)
    slugs = [tenant["slug"] for tenant in demo.client.get("tenants", limit=100)["data"]]
    assert "late" not in slugs
    form.open("/tenants").click("text=New tenant")
    form.page.fill("dialog[open] [name=slug]", "late")
    form.page.click("dialog[open] >> button:has-text('Create')")
    form.page.wait_for_selector("h1:text-is('late')")
    deadline = time.monotonic() + 60
    while (answer := demo.ask("harbour", "pirate", max_tokens=4)).status_code == 503 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert answer.status_code == 200


def _engine_of(demo: Demo) -> psutil.Process:
    children = psutil.Process(demo.server.pid).children()
    return next(child for child in children if any("engine" in word for word in child.cmdline()))


def _kill_engine_until(demo: Demo, is_enough: threading.Event) -> None:
    while not is_enough.wait(0.2):
        with contextlib.suppress(StopIteration, psutil.NoSuchProcess):
            _engine_of(demo).kill()


def _small_targets(page: Any) -> list[str]:
    """Return touch targets that are less than 44 px high, except links inside text."""
    wanted = (
        "button, .button, select, nav a, td a, th a, input:not([type=checkbox]):not([type=radio]):not([type=hidden])"
    )
    found: list[str] = page.evaluate(
        """(wanted) => [...document.querySelectorAll(wanted)]
        .filter((one) => one.offsetParent !== null && one.getBoundingClientRect().height < 43.5)
        .map((one) => one.outerHTML.slice(0, 120))""",
        wanted,
    )
    return found


def _clipped_placeholders(page: Any) -> list[str]:
    found: list[str] = page.evaluate(
        """() => {
            const pen = document.createElement("canvas").getContext("2d");
            const isClipped = (input) => {
                const style = getComputedStyle(input);
                pen.font = `${style.fontSize} ${style.fontFamily}`;
                const room = input.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
                return pen.measureText(input.placeholder).width > room;
            };
            return [...document.querySelectorAll("input[placeholder]")]
                .filter((input) => input.offsetParent !== null && isClipped(input))
                .map((input) => input.placeholder);
        }"""
    )
    return found


def _crooked_columns(page: Any) -> list[str]:
    """Return the headers on the left of a column of numbers, which are on the right, or the reverse."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("thead tr")].flatMap((headers) => {
            const isNumeric = (cell) => cell.classList.contains("num");
            const cells = headers.closest("table").querySelector("tbody tr").cells;
            if (cells.length !== headers.cells.length) return [];
            return [...headers.cells]
                .filter((header, column) => isNumeric(header) !== isNumeric(cells[column]))
                .map((header) => header.innerText);
        })"""
    )
    return found
