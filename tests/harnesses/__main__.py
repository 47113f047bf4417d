"""Run evaluation harnesses and load generators against a server: `python -m tests.harnesses`.

lm-eval's results must equal those of its own Hugging Face backend on the same files. The load generators must complete
all of their requests with their default settings. `loramux bench` must measure what vLLM's benchmark measures. TRL must
train a policy that the server runs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.tables import open_console
from tests.harnesses.beside import bench_beside_vllm
from tests.harnesses.evaluation import evaluations
from tests.harnesses.finding import Finding
from tests.harnesses.load import aiperf, guidellm, vllm_bench
from tests.harnesses.tools import ENVIRONMENTS, ToolFailed
from tests.harnesses.training import trl
from tests.strangers.sdists import unpacked
from tests.strangers.stand import Served, served

VLLM, VLLM_FILES = "vllm==0.33.0", ("vllm/benchmarks/*",)


def _vllm_bench(stand: Served, scratch: Path) -> Iterator[Finding]:
    return vllm_bench(stand, unpacked(VLLM, VLLM_FILES, ENVIRONMENTS), scratch)


def _beside(_stand: Served, scratch: Path) -> Iterator[Finding]:
    return bench_beside_vllm(unpacked(VLLM, VLLM_FILES, ENVIRONMENTS), scratch)


def _trl(_stand: Served, scratch: Path) -> Iterator[Finding]:
    return trl(scratch)


TOOLS: dict[str, Callable[[Served, Path], Iterator[Finding]]] = {
    "lm-eval": evaluations,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "vllm bench": _vllm_bench,
    "loramux bench": _beside,
    "trl": _trl,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-harnesses", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=TOOLS, help="run only one tool")
    only = parser.parse_args().only
    console = open_console()
    tools = {name: check for name, check in TOOLS.items() if only in (None, name)}
    findings: list[Finding] = []
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        task = progress.add_task("server", total=len(tools))
        with served(Path(folder), ("chat",)) as stand:
            for name, check in tools.items():
                progress.update(task, description=name)
                scratch = Path(folder) / name
                scratch.mkdir()
                try:
                    findings += check(stand["chat"], scratch)
                except ToolFailed as failed:
                    findings.append(Finding(name, "runs", str(failed), "no error", is_right=False))
                progress.advance(task)
    table = Table("tool", "check", "found", "expected", "", title="Evaluation harnesses and load generators")
    for found in findings:
        table.add_row(found.tool, found.check, found.found, found.expected, "" if found.is_right else "wrong")
    console.print(table)
    return int(not findings or any(not found.is_right for found in findings))


if __name__ == "__main__":
    raise SystemExit(main())
