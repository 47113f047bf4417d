from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loramux.admin.demo.server import DemoServer
from tests.browser.browser_tools import axe_source


@dataclass
class Tab:
    page: Any
    root: str
    complaints: list[str] = field(default_factory=list)

    def open(self, path: str) -> Any:
        self.page.goto(self.root + path)
        return self.page

    def sign_in(self, key: str) -> None:
        self.open("/login")
        self.page.fill("[name=key]", key)
        self.page.click("button.primary")
        self.page.wait_for_selector("h1:text-is('Overview')")

    def said(self) -> str:
        """The message at the top of the page."""
        return str(self.page.locator("#notices").inner_text())

    def serious(self) -> list[str]:
        """Accessibility violations that axe rates as serious or critical."""
        self.page.evaluate(axe_source())
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{rule['id']}: {node['html'][:150]} {node.get('failureSummary', '')[:200]}"
            for rule in found["violations"]
            if rule["impact"] in ("serious", "critical")
            for node in rule["nodes"][:3]
        ]


NewTab = Callable[..., Tab]


@contextmanager
def signed_in_tabs(chromium: Any, server: DemoServer) -> Iterator[NewTab]:
    """Open signed-in tabs, each in its own browser context. After the block, no tab may have logged an error."""
    tabs: list[Tab] = []

    def new(width: int = 1440, scheme: str = "light", key: str | None = None, timezone: str | None = None) -> Tab:
        viewport = {"width": width, "height": 900}
        context = chromium.new_context(viewport=viewport, color_scheme=scheme, timezone_id=timezone)
        context.set_default_timeout(60_000)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.admin_url)
        page = context.new_page()
        tab = Tab(page, f"{server.admin_url}/console")
        page.on("pageerror", lambda error: tab.complaints.append(f"script: {error}"))
        page.on("console", lambda message: _note(tab, message))
        page.on("dialog", lambda dialog: dialog.accept())
        tab.sign_in(key or server.admin_key)
        tabs.append(tab)
        return tab

    yield new
    complaints = [complaint for tab in tabs for complaint in tab.complaints]
    for tab in tabs:
        tab.page.context.close()
    assert not complaints


def keep_screenshot(page: Any, name: str) -> None:
    """Save a screenshot if LORAMUX_SCREENSHOTS names a directory."""
    if "LORAMUX_SCREENSHOTS" in os.environ:
        page.screenshot(path=Path(os.environ["LORAMUX_SCREENSHOTS"]) / f"{name}.png")


def _note(tab: Tab, message: Any) -> None:
    # Errors include content security policy violations. Ignore failed requests, which some tests provoke.
    if message.type == "error" and "Failed to load resource" not in message.text:
        tab.complaints.append(message.text)
