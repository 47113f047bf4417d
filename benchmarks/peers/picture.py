"""A bar chart of tokens/s: a panel per load, a group per kind of work, and a bar per system at its best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, PANEL_HEIGHT = 760, 240
LEFT, RIGHT, HEADER, TOP, BOTTOM = 24, 16, 64, 28, 32
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")
BAR_SHARE = 0.8
"""Share of a group's width for its bars. The rest is the gap to the next group."""


def draw_bars(title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]], names: Sequence[str]) -> str:
    """Draw `panels`: tokens/s by panel, group and name. A name has the same colour in all panels."""
    height = HEADER + PANEL_HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(WIDTH / 2, 20, title, "middle"),
    ]
    for place, name in enumerate(names):
        x = LEFT + 170 * place
        parts.append(_rectangle(x, 36, 12, 12, COLOURS[place % len(COLOURS)]))
        parts.append(_text(x + 18, 46, name, "start"))
    for number, (panel, groups) in enumerate(panels.items()):
        parts += _panel(panel, groups, names, HEADER + number * PANEL_HEIGHT)
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, groups: Mapping[str, Mapping[str, float]], names: Sequence[str], top: float) -> list[str]:
    highest = max(value for bars in groups.values() for value in bars.values())
    floor, room = top + PANEL_HEIGHT - BOTTOM, PANEL_HEIGHT - BOTTOM - TOP - 16
    group_width = (WIDTH - LEFT - RIGHT) / len(groups)
    bar_width = BAR_SHARE * group_width / len(names)
    parts = [
        _text(LEFT, top + 12, title, "start"),
        f'<line x1="{LEFT}" y1="{floor}" x2="{WIDTH - RIGHT}" y2="{floor}" stroke="#999"/>',
    ]
    for place, (group, bars) in enumerate(groups.items()):
        start = LEFT + place * group_width + (1 - BAR_SHARE) / 2 * group_width
        parts.append(_text(LEFT + (place + 0.5) * group_width, floor + 18, group, "middle"))
        for number, name in enumerate(names):
            if name not in bars:
                continue
            height = room * bars[name] / highest
            x = start + number * bar_width
            parts.append(_rectangle(x, floor - height, bar_width - 2, height, COLOURS[number % len(COLOURS)]))
            parts.append(_text(x + bar_width / 2 - 1, floor - height - 4, f"{bars[name]:.3g}", "middle"))
    return parts


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
