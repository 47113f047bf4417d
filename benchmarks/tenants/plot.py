"""Plots the tails of latency distributions as an SVG, with one line per variant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from benchmarks.tenants.figures import percentile

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 72, 56
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")
PERCENTS = (0, 50, 75, 90, 95, 98, 99, 99.5, 99.9)
LABELLED = (0, 50, 90, 99, 99.9)
NUM_TICKS = 5
LEGEND_WIDTH = 150


def draw_tails(title: str, axis: str, lines: Mapping[str, Sequence[float]]) -> str:
    """Draw `lines`, which maps names to samples in seconds. On the percentile axis, each additional nine has the same
    width."""
    curves = {name: [(p, 1e3 * percentile(samples, p)) for p in PERCENTS] for name, samples in lines.items()}
    curves = {name: [(p, value) for p, value in points if value < math.inf] for name, points in curves.items()}
    top = _round_up(max((value for points in curves.values() for _, value in points), default=1.0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 20, title, "middle"),
        _text(WIDTH / 2, HEIGHT - 12, "percentile", "middle"),
        _text(16, TOP - 30, f"{axis}, ms", "start"),
    ]
    for tick in range(NUM_TICKS + 1):
        value = top * tick / NUM_TICKS
        y = _y(value, top)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:g}", "end"))
    parts += [_text(_x(p), HEIGHT - BOTTOM + 18, f"{p:g}", "middle") for p in LABELLED]
    for place, (name, points) in enumerate(curves.items()):
        colour = COLOURS[place % len(COLOURS)]
        path = " ".join(f"{_x(p):.1f},{_y(value, top):.1f}" for p, value in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x = LEFT + LEGEND_WIDTH * place
        parts.append(f'<rect x="{x}" y="{TOP - 22}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, TOP - 12, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


def _x(percent: float) -> float:
    nines = -math.log10(1 - percent / 100)
    return LEFT + 8 + (WIDTH - LEFT - RIGHT - 16) * nines / -math.log10(1 - PERCENTS[-1] / 100)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / top


def _round_up(value: float) -> float:
    """The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is at least `value`."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
