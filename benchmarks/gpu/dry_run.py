"""The dry run of the GPU benchmark: compares its parts' needs with a card's memory and with the parts' time limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import CONTEXT_BYTES, MAX_WARMERS, Bench
from benchmarks.gpu.needs import ASSUMPTIONS, CHECK, CHECK_S, COMPILE_S, Need, compiling_seconds, planned
from benchmarks.gpu.parts import Part


@dataclass(frozen=True, slots=True)
class Limits:
    """No case starts after `total_s` seconds, and compilation may take at most `warm_s` seconds."""

    total_s: float
    warm_s: float


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A part's needs.

    `seconds` is its time within a run of all parts. A run of all parts leaves out a part that `is_apart`. `alone_s` is
    the time of a separate run of this part and the ceilings, including compilation. `problems` lists the needs that do
    not fit.
    """

    name: str
    num_rows: int
    num_programs: int
    most_bytes: float
    seconds: float
    budget_s: float
    compile_s: float
    alone_s: float
    is_apart: bool
    needs: tuple[Need, ...]
    problems: tuple[str, ...]


def plan(bench: Bench, parts: Sequence[Part], limits: Limits) -> list[PlannedPart]:
    found: list[PlannedPart] = []
    for part in parts:
        needs = tuple(part.needs(bench))
        programs = frozenset[str]().union(*(need.programs for need in needs))
        # Parts with a `warm` function are compiled in separate processes, outside the part's time.
        compile_s = compiling_seconds(len(programs)) if part.warm else 0.0
        alone_s = sum(need.seconds for need in needs) + (0.0 if part.warm else COMPILE_S * len(programs))
        is_checked = any(need.case == CHECK for one in found for need in one.needs)
        seconds = alone_s - (CHECK_S if is_checked and any(need.case == CHECK for need in needs) else 0.0)
        alone_s += compile_s + (found[0].seconds if found else 0.0)
        most = max(need.num_bytes + CONTEXT_BYTES for need in needs)
        found.append(
            PlannedPart(
                name=part.name,
                num_rows=sum(need.num_rows for need in needs),
                num_programs=len(programs),
                most_bytes=most,
                seconds=seconds,
                budget_s=part.budget_s,
                compile_s=compile_s,
                alone_s=alone_s,
                is_apart=part.is_apart,
                needs=needs,
                problems=_problems(bench, part, needs, (seconds, compile_s, alone_s), limits),
            )
        )
    return found


def _problems(
    bench: Bench, part: Part, needs: Sequence[Need], seconds: tuple[float, float, float], limits: Limits
) -> tuple[str, ...]:
    problems = [f"{need.case}: {problem}" for need in needs if (problem := why_not(bench, need))]
    for label, taken, limit in zip(
        ("among all parts", "to compile", "alone"), seconds, (part.budget_s, limits.warm_s, limits.total_s), strict=True
    ):
        if taken > limit:
            problems.append(f"{taken:.0f} s {label}, of {limit:.0f} s")
    return tuple(problems)


def why_not(bench: Bench, need: Need) -> str:
    """Return why a case does not fit, or an empty string if it fits."""
    if need.problem:
        return need.problem
    limit = planned(bench).memory_bytes
    taken = need.num_bytes + CONTEXT_BYTES
    return f"{taken / 1e9:.1f} GB of {limit / 1e9:.0f} GB" if taken > limit else ""


def whole_run(parts: Sequence[PlannedPart]) -> tuple[float, float]:
    """Seconds to compile all parts, and seconds of a whole run. Programs shared by two parts count twice."""
    together = [part for part in parts if not part.is_apart]
    compile_s = compiling_seconds(sum(part.num_programs for part in together if part.compile_s))
    return compile_s, compile_s + sum(part.seconds for part in together)


def dry_run(bench: Bench, parts: Sequence[Part], limits: Limits, out: Path | None) -> int:
    """Print the report, write it as JSON to `out` and as Markdown next to it, and return 1 if anything does not fit."""
    found = plan(bench, parts, limits)
    compile_s, total_s = whole_run(found)
    problems = [f"{part.name}: {problem}" for part in found for problem in part.problems]
    if compile_s > limits.warm_s:
        problems.append(f"all parts: {compile_s:.0f} s to compile, of {limits.warm_s:.0f} s")
    if total_s > limits.total_s:
        problems.append(f"all parts: {total_s:.0f} s, of {limits.total_s:.0f} s")
    text = markdown(bench, found, limits, problems)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document(bench, found, problems), indent=1) + "\n")
        out.with_suffix(".md").write_text(text)
    return 1 if problems else 0


def document(bench: Bench, parts: Sequence[PlannedPart], problems: Sequence[str]) -> dict[str, Any]:
    compile_s, total_s = whole_run(parts)
    return {
        "card": asdict(planned(bench)),
        "assumptions": ASSUMPTIONS,
        "problems": problems,
        "compile_s": round(compile_s, 1),
        "total_s": round(total_s, 1),
        "parts": {
            part.name: {
                **{name: value for name, value in asdict(part).items() if name not in ("name", "needs")},
                "cases": [
                    asdict(need) | {"programs": len(need.programs), "problem": why_not(bench, need)}
                    for need in part.needs
                ],
            }
            for part in parts
        },
    }


def markdown(bench: Bench, parts: Sequence[PlannedPart], limits: Limits, problems: Sequence[str]) -> str:
    limits_of_card = planned(bench)
    card, memory_gb = limits_of_card.card, limits_of_card.memory_bytes / 1e9
    compile_s, total_s = whole_run(parts)
    lines = [
        f"# Dry run of the GPU benchmark for {card.name}",
        "",
        "Written by `python -m benchmarks.gpu --dry-run` without a card. Tensor sizes come from the functions that run "
        f"the cases. Times are estimates for {card.bandwidth / 1e12:g} TB/s, "
        f"{limits_of_card.matmul / 1e12:g} TFLOP/s and {card.node_s * 1e6:g} us per launch, with these assumptions:",
        "",
        *(f"- {one}" for one in ASSUMPTIONS),
        "",
        "**" + ("Does not fit: " + "; ".join(problems) if problems else "Every part fits.") + "**",
        "",
        "| part | rows | programs | compile s | most GB | GB | s | budget s | alone s | fits |",
        "|---|" + "---:|" * 8 + "---|",
    ]
    for part in parts:
        lines.append(
            f"| {part.name} | {part.num_rows} | {part.num_programs} | {part.compile_s:.0f} | "
            f"{part.most_bytes / 1e9:.1f} | {memory_gb:.0f} | {part.seconds:.0f} | {part.budget_s:.0f} | "
            f"{part.alone_s:.0f} | {_mark('; '.join(part.problems))} |"
        )
    lines += [
        "",
        f"All parts in one run{_without(parts)}: {total_s:.0f} s, including {compile_s:.0f} s to compile in "
        f"{MAX_WARMERS} processes. No case starts after {limits.total_s:.0f} s, and the run ends "
        "within nine minutes. A part that runs alone may use all of that time.",
    ]
    for part in parts:
        lines += ["", f"## {part.name}", "", "| case | tensors | rows | holds, GB | GB | s | programs | fits |"]
        lines.append("|---|---|---:|---|---:|---:|---:|---|")
        for need in part.needs:
            tensors = "; ".join(f"{name} {shape}" for name, shape in need.shapes.items())
            held = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in need.held.items())
            lines.append(
                f"| {need.case} | {tensors} | {need.num_rows} | {held} | {need.num_bytes / 1e9:.2f} | "
                f"{need.seconds:.1f} | {len(need.programs)} | {_mark(why_not(bench, need))} |"
            )
    return "\n".join(lines) + "\n"


def _without(parts: Sequence[PlannedPart]) -> str:
    apart = [f"`{part.name}`" for part in parts if part.is_apart]
    return f" without {' and '.join(apart)}, which run only alone" if apart else ""


def _mark(problem: str) -> str:
    return f"**NO**: {problem}" if problem else "yes"
