from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import grimp

ROOT = Path(__file__).parents[2]
COLUMNS = (("admin",), ("platform",), ("engine",), ("adapter_store", "kernels", "migrations"))
"""Columns of folders, left to right. A folder imports only folders to its right or, in the last column, below it."""

LETTER, BOX_HEIGHT, ROW, GAP, MARGIN = 7.2, 24, 42, 14, 18
STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; text-anchor: middle }
.folder { font-weight: bold; font-size: 14px }
.panel { fill: #f6f8fa; stroke: #d1d9e0 }
.package { fill: #ddf4ff; stroke: #54aeff }
.module { fill: #ffffff; stroke: #afb8c1 }
path { fill: none; stroke: #818b98; stroke-opacity: 0.7 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .panel { fill: #151b23; stroke: #3d444d }
  .package { fill: #0c2d6b; stroke: #388bfd }
  .module { fill: #212830; stroke: #656c76 }
  path { stroke: #9198a1 }
}
"""


@dataclass(frozen=True, slots=True)
class Box:
    """`is_last` marks the last box of a row."""

    left: float
    top: float
    width: float
    is_last: bool


Layers = Sequence[Sequence[str]]
Arrows = set[tuple[str, str]]


def architecture_picture() -> str:
    graph = grimp.build_graph("loramux", include_external_packages=False, cache_dir=None)
    layers = _contracts()
    drawn: list[str] = []
    x, bottom = float(MARGIN), 0.0
    for column in COLUMNS:
        y, width = float(MARGIN), max(_width(layers.get(folder, ())) for folder in column)
        for folder in column:
            panel, height = _panel(
                folder, layers.get(folder, ()), _arrows(graph, folder) if folder in layers else set(), x, y, width
            )
            drawn += panel
            y += height + MARGIN
        x += width + MARGIN
        bottom = max(bottom, y)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {x:g} {bottom:g}" role="img">'
    title = "<title>The packages of loramux: each imports what is below it, and folders further to the right</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *drawn, "</svg>", ""])


def _contracts() -> Mapping[str, Layers]:
    settings: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    return {
        contract["containers"][0].removeprefix("loramux."): [
            [name.strip() for name in layer.split("|")] for layer in contract["layers"]
        ]
        for contract in contracts
        if contract["type"] == "layers"
    }


def _arrows(graph: grimp.ImportGraph, folder: str) -> Arrows:
    """Return the imports between a folder's packages, without imports implied by other imports."""
    prefix = f"loramux.{folder}."
    imports: dict[str, set[str]] = {}
    for module in graph.modules:
        if not module.startswith(prefix):
            continue
        room = module.removeprefix(prefix).split(".")[0]
        found = {name for name in graph.find_modules_directly_imported_by(module) if name.startswith(prefix)}
        imports.setdefault(room, set()).update(name.removeprefix(prefix).split(".")[0] for name in found)
    direct = {room: rooms - {room} for room, rooms in imports.items()}
    return {
        (room, other)
        for room, others in direct.items()
        for other in others
        if not any(other in _reached(direct, third) for third in others - {other})
    }


def _reached(direct: Mapping[str, Iterable[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for room in direct.get(waiting.pop(), ()):
            if room not in reached:
                reached.add(room)
                waiting.append(room)
    return reached


def _label(folder: str, room: str) -> str:
    return f"{room}/" if (ROOT / folder / room).is_dir() else f"{room}.py"


def _box_width(room: str) -> float:
    return (len(room) + 3) * LETTER + 8


def _width(layers: Layers) -> float:
    rows = [sum(_box_width(room) + GAP for room in row) + 3 * GAP for row in layers]
    return max([*rows, 180.0])


def _panel(folder: str, layers: Layers, arrows: Arrows, x: float, y: float, width: float) -> tuple[list[str], float]:
    height = 40 + len(layers) * ROW
    drawn = [
        f'<rect class="panel" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>',
        f'<text class="folder" x="{x + width / 2:g}" y="{y + 24:g}">{folder}/</text>',
    ]
    boxes: dict[str, Box] = {}
    for level, row in enumerate(layers):
        left = x + (width - sum(_box_width(room) + GAP for room in row) + GAP) / 2
        for room in row:
            boxes[room] = Box(left, y + 40 + level * ROW, _box_width(room), room == row[-1])
            left += _box_width(room) + GAP
    for room, other in sorted(arrows):
        drawn.append(_curve(boxes[room], boxes[other], x + width))
    for room, box in boxes.items():
        kind = "package" if (ROOT / folder / room).is_dir() else "module"
        drawn.append(
            f'<rect class="{kind}" x="{box.left:g}" y="{box.top:g}" width="{box.width:g}" height="{BOX_HEIGHT}" '
            f'rx="4"/>'
            f'<text x="{box.left + box.width / 2:g}" y="{box.top + 16:g}">{escape(_label(folder, room))}</text>'
        )
    return drawn, height


def _curve(start: Box, end: Box, right: float) -> str:
    """Return a curve from `start` to `end` around any rows in between."""
    from_x, to_x = start.left + start.width / 2, end.left + end.width / 2
    from_y, to_y = start.top + BOX_HEIGHT, end.top
    rows = round((end.top - start.top) / ROW)
    if rows == 1:
        middle = (from_y + to_y) / 2
        return f'<path d="M{from_x:g} {from_y:g} C{from_x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"/>'
    from_x, from_y = start.left + start.width, start.top + BOX_HEIGHT / 2
    outside = min(max(from_x, end.left + end.width) + 10 * rows, right - 4)
    if not end.is_last:
        # Enter from above, because another box is in the way on the right.
        above = to_y - (ROW - BOX_HEIGHT) / 2
        return (
            f'<path d="M{from_x:g} {from_y:g} C{outside:g} {from_y:g} {outside:g} {above:g} {outside - 30:g} {above:g} '
            f'S{to_x:g} {above:g} {to_x:g} {to_y:g}"/>'
        )
    to_x, to_y = end.left + end.width, end.top + BOX_HEIGHT / 2
    return f'<path d="M{from_x:g} {from_y:g} C{outside:g} {from_y:g} {outside:g} {to_y:g} {to_x:g} {to_y:g}"/>'
