"""Plots of lines over a horizontal axis, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from loramux.admin.bench.pictures import RIGHT, WIDTH, colours, legend, page, svg_text

HEIGHT = 420
LEFT, TOP, BOTTOM = 80, 72, 56
NUM_TICKS = 5

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

    parts = [svg_text(WIDTH / 2, HEIGHT - 12, axes[0], "middle"), svg_text(16, TOP - 30, axes[1], "start")]
    for tick in range(NUM_TICKS + 1):
        value = top * tick / NUM_TICKS
        y = at(labels[0], value)[1]
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(svg_text(LEFT - 8, y + 4, f"{value:g}", "end"))
    parts += [svg_text(at(label, 0)[0], HEIGHT - BOTTOM + 18, f"{label:g}", "middle") for label in labels]
    for colour, (_, points) in zip(colours(len(lines)), lines.items(), strict=True):
        placed = [at(*point) for point in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if has_dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in placed]
    return page(title, HEIGHT, [*legend(list(lines), TOP - 22), *parts])


def _round_up(value: float) -> float:
    """The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is at least `value`."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value)
