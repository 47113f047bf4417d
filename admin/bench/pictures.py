"""Plots as SVG: lines over a horizontal axis, and groups of bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, PANEL_HEIGHT = 720, 420, 240
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 72, 56
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")
NUM_TICKS = 5
LEGEND_WIDTH = 150
BAR_SHARE = 0.8
"""Share of a group's width for its bars. The rest is the gap to the next group."""

Points = Sequence[tuple[float, float]]


def draw_lines(
    title: str,
    axes: tuple[str, str],
    lines: Mapping[str, Points],
    place: Callable[[float], float],
    labels: Sequence[float],
    has_dots: bool = False,
) -> str:
    """Draw one line per name. `place` maps a horizontal value to [0, 1], and `labels` are written below the axis."""
    top = _round_up(max((value for points in lines.values() for _, value in points), default=1.0))

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + 16 + (WIDTH - LEFT - RIGHT - 32) * place(x), HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * y / top

    parts = [_text(WIDTH / 2, HEIGHT - 12, axes[0], "middle"), _text(16, TOP - 30, axes[1], "start")]
    for tick in range(NUM_TICKS + 1):
        value = top * tick / NUM_TICKS
        y = at(labels[0], value)[1]
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:g}", "end"))
    parts += [_text(at(label, 0)[0], HEIGHT - BOTTOM + 18, f"{label:g}", "middle") for label in labels]
    for colour, (_, points) in zip(_colours(len(lines)), lines.items(), strict=True):
        placed = [at(*point) for point in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if has_dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in placed]
    return _page(title, HEIGHT, [*_legend(list(lines), TOP - 22), *parts])


def draw_bars(title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]], names: Sequence[str]) -> str:
    """Draw `panels`: a value by panel, group and name. A name has the same colour in all panels."""
    parts = _legend(names, 36)
    for number, (panel, groups) in enumerate(panels.items()):
        parts += _panel(panel, groups, names, 64 + number * PANEL_HEIGHT)
    return _page(title, 64 + PANEL_HEIGHT * len(panels), parts)


def _panel(title: str, groups: Mapping[str, Mapping[str, float]], names: Sequence[str], top: float) -> list[str]:
    highest = max(value for bars in groups.values() for value in bars.values())
    floor, room = top + PANEL_HEIGHT - 32, PANEL_HEIGHT - 76
    group_width = (WIDTH - 2 * RIGHT) / len(groups)
    bar_width = BAR_SHARE * group_width / len(names)
    parts = [
        _text(RIGHT, top + 12, title, "start"),
        f'<line x1="{RIGHT}" y1="{floor}" x2="{WIDTH - RIGHT}" y2="{floor}" stroke="#999"/>',
    ]
    for place, (group, bars) in enumerate(groups.items()):
        start = RIGHT + (place + (1 - BAR_SHARE) / 2) * group_width
        parts.append(_text(RIGHT + (place + 0.5) * group_width, floor + 18, group, "middle"))
        for number, (name, colour) in enumerate(zip(names, _colours(len(names)), strict=True)):
            if name in bars:
                x, height = start + number * bar_width, room * bars[name] / highest
                parts.append(_rectangle(x, floor - height, bar_width - 2, height, colour))
                parts.append(_text(x + bar_width / 2 - 1, floor - height - 4, f"{bars[name]:.3g}", "middle"))
    return parts


def _page(title: str, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
    background = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join(
        [head + 'font-size="12" fill="#333">', background, _text(WIDTH / 2, 20, title, "middle"), *parts, "</svg>", ""]
    )


def _legend(names: Sequence[str], y: float) -> list[str]:
    parts = []
    for place, (name, colour) in enumerate(zip(names, _colours(len(names)), strict=True)):
        x = RIGHT + LEGEND_WIDTH * place
        parts += [_rectangle(x, y, 12, 12, colour), _text(x + 18, y + 10, name, "start")]
    return parts


def _colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _round_up(value: float) -> float:
    """The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is at least `value`."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value)


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
