from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
