"""Draws quotas as bars in a terminal: the used, reserved and free parts of each limit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

BAR_WIDTH = 40
USED, RESERVED, FREE = "█", "▒", "·"


def print_plot(limits: Iterable[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from loramux.admin.client.safe_text import safe_text
    from loramux.platform.amounts import amount_text

    console = Console()
    if not console.is_terminal:
        console.width = 250
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("metric", "of", "mode", f"used {USED} reserved {RESERVED} free {FREE}"):
        table.add_column(column, no_wrap=True)
    for column in ("used", "reserved", "limit", "free again"):
        table.add_column(column, no_wrap=True, justify="right")
    for limit in limits:
        whose = f"{limit['scope']} (inherited)" if limit["is_inherited"] else limit["scope"]
        color = "red" if limit["is_exceeded"] else "yellow" if limit["num_exceeded"] else "green"
        amounts = [amount_text(limit[name], limit["unit"]) for name in ("used", "reserved", "limit")]
        texts = [Text(safe_text(str(text))) for text in (limit["metric"], whose, limit["mode"])]
        table.add_row(*texts, Text(bar(limit), style=color), *amounts, _reset(limit))
    console.print(table)


def bar(limit: Mapping[str, Any]) -> str:
    """Return a bar of `BAR_WIDTH` characters. Usage over the limit, or a limit of 0, fills the bar.

    Nonzero usage gets at least one character, and so does a nonzero reservation if there is room.
    """
    # A token bucket's capacity is its burst. For other limits, `burst` equals the limit.
    size = limit["burst"]
    if size <= 0:
        return USED * BAR_WIDTH
    used = _cells(limit["used"], size)
    reserved = min(_cells(limit["reserved"], size), BAR_WIDTH - used)
    return USED * used + RESERVED * reserved + FREE * (BAR_WIDTH - used - reserved)


def _cells(amount: int, size: int) -> int:
    return min(BAR_WIDTH, -(-amount * BAR_WIDTH // size))


def _reset(limit: Mapping[str, Any]) -> str:
    if limit["reset_at"] is None or limit["used"] == 0:
        return "-"
    seconds = max(0, limit["reset_at"] - int(time.time()))
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
