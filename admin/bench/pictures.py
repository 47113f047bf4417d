"""Plots as SVG: groups of bars, and the parts that other plots share with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, PANEL_HEIGHT = 720, 240
RIGHT = 24
"""Margin of the plot, in pixels."""
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")
LEGEND_WIDTH = 150
BAR_SHARE = 0.8
"""Share of a group's width for its bars. The rest is the gap to the next group."""


def draw_bars(title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]], names: Sequence[str]) -> str:
    """Draw `panels`: a value by panel, group and name. A name has the same colour in all panels."""
    parts = legend(names, 36)
    for number, (panel, groups) in enumerate(panels.items()):
        parts += _panel(panel, groups, names, 64 + number * PANEL_HEIGHT)
    return page(title, 64 + PANEL_HEIGHT * len(panels), parts)


def _panel(title: str, groups: Mapping[str, Mapping[str, float]], names: Sequence[str], top: float) -> list[str]:
    highest = max(value for bars in groups.values() for value in bars.values())
    floor, room = top + PANEL_HEIGHT - 32, PANEL_HEIGHT - 76
    group_width = (WIDTH - 2 * RIGHT) / len(groups)
    bar_width = BAR_SHARE * group_width / len(names)
    parts = [
        svg_text(RIGHT, top + 12, title, "start"),
        f'<line x1="{RIGHT}" y1="{floor}" x2="{WIDTH - RIGHT}" y2="{floor}" stroke="#999"/>',
    ]
    for place, (group, bars) in enumerate(groups.items()):
        start = RIGHT + (place + (1 - BAR_SHARE) / 2) * group_width
        parts.append(svg_text(RIGHT + (place + 0.5) * group_width, floor + 18, group, "middle"))
        for number, (name, colour) in enumerate(zip(names, colours(len(names)), strict=True)):
            if name in bars:
                x, height = start + number * bar_width, room * bars[name] / highest
                parts.append(_rectangle(x, floor - height, bar_width - 2, height, colour))
                parts.append(svg_text(x + bar_width / 2 - 1, floor - height - 4, f"{bars[name]:.3g}", "middle"))
    return parts


def page(title: str, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
    background = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join(
        [
            head + 'font-size="12" fill="#333">',
            background,
            svg_text(WIDTH / 2, 20, title, "middle"),
            *parts,
            "</svg>",
            "",
        ]
    )


def legend(names: Sequence[str], y: float) -> list[str]:
    parts = []
    for place, (name, colour) in enumerate(zip(names, colours(len(names)), strict=True)):
        x = RIGHT + LEGEND_WIDTH * place
        parts += [_rectangle(x, y, 12, 12, colour), svg_text(x + 18, y + 10, name, "start")]
    return parts


def colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def svg_text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
