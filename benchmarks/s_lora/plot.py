"""Plots throughput against the number of adapters as an SVG, with one line per policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 64, 56
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")
NUM_TICKS = 5


def draw_plot(title: str, lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Draw `lines`, which maps each name to its (adapters, tokens/s) points, with a logarithmic horizontal axis."""
    numbers = sorted({number for points in lines.values() for number, _ in points})
    top = _round_up(max(value for points in lines.values() for _, value in points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 20, title, "middle"),
        _text(WIDTH / 2, HEIGHT - 12, "adapters", "middle"),
        _text(LEFT, TOP - 10, "tokens/s", "end"),
    ]
    for tick in range(NUM_TICKS + 1):
        value = top * tick / NUM_TICKS
        y = _y(value, top)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:g}", "end"))
    parts += [_text(_x(number, numbers), HEIGHT - BOTTOM + 18, str(number), "middle") for number in numbers]
    for place, (name, points) in enumerate(lines.items()):
        colour = COLOURS[place % len(COLOURS)]
        path = " ".join(f"{_x(number, numbers):.1f},{_y(value, top):.1f}" for number, value in sorted(points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{_x(number, numbers):.1f}" cy="{_y(value, top):.1f}" r="3.5" fill="{colour}"/>'
            for number, value in points
        ]
        x = LEFT + 16 + 140 * place
        parts.append(f'<rect x="{x}" y="{TOP - 28}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, TOP - 18, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


def _x(number: int, numbers: Sequence[int]) -> float:
    width = WIDTH - LEFT - RIGHT
    if len(numbers) == 1:
        return LEFT + width / 2
    first, last = math.log(numbers[0]), math.log(numbers[-1])
    return LEFT + 16 + (width - 32) * (math.log(number) - first) / (last - first)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / top


def _round_up(value: float) -> float:
    """The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is at least `value`."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
