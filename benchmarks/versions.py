"""Compares the decoding speed of this checkout with the speed of another checkout, in one run.

One process per version loads the same random 1B model and adapters. The processes take turns, each for a few decode
steps of the base alone and of one adapter per row, so that drift in the machine's speed affects both alike. Medians of
the time per step are compared. Before that, both must generate the same tokens.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from benchmarks.answers import CheckError, RunFailed
from benchmarks.harness import SCRATCH, begin, new_parser, reports_failure
from benchmarks.machine import commit
from benchmarks.peers.model_files import ModelFiles, make_model_files
from benchmarks.random_model import SHAPES
from benchmarks.tables import table

NUM_ROWS = 16
PROMPT = 64
KINDS = ("base only", "distinct adapters")

OWN_CODE = """
import sys
from pathlib import Path

checkout = Path.cwd() / ".src"
sys.path = [path for path in sys.path if Path(path) == checkout or not (Path(path) / "loramux").is_dir()]
"""
"""Keeps only this version's checkout. `loramux` is a namespace package, so a module that this version lacks would be
taken from the checkout that is installed.
"""

WORKER = """
import json, time
import torch
from importlib import import_module

def module_of(*names):
    # Modules have moved: take the first of these names that this version has.
    for name in names:
        try:
            return import_module("loramux." + name)
        except ModuleNotFoundError:
            if name == names[-1]:
                raise

formats = "adapter_store.formats."
write_canonical = module_of(formats + "packed.canonical", formats + "canonical").write_canonical
pack = module_of(formats + "packed.packing", formats + "packing").pack
validate_files = module_of("adapter_store.validation.validation").validate_files
MemoryStager = module_of("engine.adapters.stager").MemoryStager
assemble_engine = module_of("engine.loop.assembly", "engine.assembly").assemble_engine
config = module_of("engine.loop.config", "engine.config")
messages = module_of("engine.protocol.messages", "engine.messages")
ModelConfig = module_of("engine.architectures.model_config", "engine.model.model_config").ModelConfig

base, adapters, canonical, threads, prompt, vocabulary = json.loads(sys.argv[1])
torch.set_num_threads(threads)
target = config.pack_target(ModelConfig.load(Path(base)), "bfloat16")
packed = []
for directory in map(Path, adapters):
    tensors = directory / "adapter_model.safetensors"
    report = validate_files((directory / "adapter_config.json").read_bytes(), tensors, target)
    write_canonical(tensors, report.scales, Path(canonical))
    packed.append(pack(Path(canonical), target))
settings = config.EngineConfig(
    model_dir=base, blob_url="", cache_dir="", dtype="bfloat16", pool_bytes=640 << 20, num_threads=threads
)
assembled = assemble_engine(settings, lambda: None, MemoryStager({one.digest: one for one in packed}))
engine = assembled.engine
for one in packed:
    engine.load(b"", messages.Load(call_id=one.digest, digest=one.digest))
while engine.has_work:
    engine.step()
digests = {"base only": [None] * len(packed), "distinct adapters": [one.digest for one in packed]}
sampling = messages.SamplingParams(temperature=0.0, ignore_eos=True)

def step(answers):
    engine.step()
    for outbound in engine.take_outbox():
        if isinstance(outbound.message, messages.StepOutput):
            for output in outbound.message.outputs:
                answers.setdefault(output.sequence_id, []).extend(output.token_ids)

print("ready", flush=True)
for line in sys.stdin:
    kind, seed, num_steps = json.loads(line)
    size = (len(packed), prompt)
    prompts = torch.randint(10, vocabulary, size, generator=torch.Generator().manual_seed(seed)).tolist()
    for row, digest in enumerate(digests[kind]):
        add = messages.Add(
            sequence_id=str(row), prompt=tuple(prompts[row]), max_tokens=num_steps + 8, sampling=sampling, digest=digest
        )
        engine.add(b"", add)
    answers = {}
    while len(answers) < len(packed):
        step(answers)
    started = time.perf_counter()
    for _ in range(num_steps):
        step(answers)
    seconds = time.perf_counter() - started
    engine.abort_all()
    while engine.has_work:
        engine.step()
    engine.take_outbox()
    print(json.dumps([seconds / num_steps, [answers[str(row)][:num_steps] for row in range(len(packed))]]), flush=True)
"""
"""The program of each process. It runs with the code of either version, so it uses only names that exist in both."""


class Decoder(Protocol):
    def decode(self, kind: str, seed: int, num_steps: int) -> tuple[float, list[list[int]]]:
        """Return the time per step, in seconds, and the tokens of each row."""


class Version:
    """A process that runs the code of one checkout."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def wait_until_ready(self) -> None:
        if self._read() != "ready\n":
            raise SystemExit("a version did not start")

    def decode(self, kind: str, seed: int, num_steps: int) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, seed, num_steps]) + "\n")
        self._process.stdin.flush()
        seconds, tokens = json.loads(self._read())
        return seconds, tokens

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a version ended early")
        return line


def compile_kernels(checkout: Path) -> None:
    """Compile the CPU kernels of a checkout, and print how long it takes. Otherwise its process would do so silently.

    Raise RunFailed for another folder, because its process would find the modules of this checkout instead.
    """
    if not (checkout / ".src" / "loramux").is_dir():
        raise RunFailed(f"{checkout} is not a checkout of loramux")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "loramux.kernels.cpu.warm"], env=_environment(checkout), cwd=checkout, check=False
    )
    if done.returncode:
        raise RunFailed(f"the kernels of {checkout} cannot be compiled")


def _environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout / ".src"), str(checkout)])}


@contextmanager
def open_version(checkout: Path, files: ModelFiles, threads: int) -> Iterator[Version]:
    paths = [str(path) for path in files.adapters.values()]
    canonical = files.directory / f"canonical-{os.getpid()}.safetensors"
    job = json.dumps([str(files.base), paths, str(canonical), threads, PROMPT, files.shape.vocab_size])
    # With -P, modules of the current directory do not hide modules of the checkout.
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", OWN_CODE + WORKER, job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(checkout),
        cwd=checkout,
    )
    try:
        version = Version(process)
        version.wait_until_ready()
        yield version
    finally:
        process.kill()
        process.wait()
        canonical.unlink(missing_ok=True)


def compare(before: Decoder, after: Decoder, rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """Milliseconds per step of both versions in each round, and the ratio of their medians, by kind of work."""
    cases = []
    for kind in KINDS:
        tokens = [version.decode(kind, 1_000, num_steps)[1] for version in (before, after)]
        if tokens[0] != tokens[1]:
            raise CheckError(f"{kind}: the versions generate different tokens")
        taken: dict[str, list[float]] = {"before": [], "after": []}
        for number in range(rounds):
            pairs = [("before", before), ("after", after)]
            for name, version in pairs if number % 2 == 0 else reversed(pairs):
                taken[name].append(round(1_000 * version.decode(kind, number, num_steps)[0], 3))
        middle = {name: statistics.median(values) for name, values in taken.items()}
        within = [after_ms / before_ms for before_ms, after_ms in zip(taken["before"], taken["after"], strict=True)]
        cases.append(
            {
                "kind": kind,
                "ms": taken,
                "median_ms": middle,
                "after_over_before": round(middle["after"] / middle["before"], 4),
                "after_over_before_by_round": round(statistics.median(within), 4),
                "quartiles_by_round": [round(value, 4) for value in statistics.quantiles(within, n=4)],
            }
        )
    return cases


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("versions", __doc__)
    add = parser.add_argument
    add("before", type=Path, help="checkout of the other version")
    add("--model", choices=sorted(SHAPES), default="1b")
    add("--rounds", type=int, default=12)
    add("--steps", type=int, default=16, help="decode steps per turn")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--scratch", type=Path, default=SCRATCH / "peers", help="directory for models")
    run = begin(parser.parse_args(argv))
    parsed = run.arguments
    checkouts = parsed.before.absolute(), SCRATCH.parents[1]
    for checkout in checkouts:
        compile_kernels(checkout)
    files = make_model_files(parsed.scratch, parsed.model, NUM_ROWS, 16)
    with ExitStack() as stack:
        before, after = (stack.enter_context(open_version(each, files, parsed.threads)) for each in checkouts)
        cases = compare(before, after, parsed.rounds, parsed.steps)
    rows = []
    for case in cases:
        times = (f"{case['median_ms'][name]:.2f}" for name in ("before", "after"))
        ratios = f"{case['after_over_before']:.3f}", f"{case['after_over_before_by_round']:.3f}"
        rows.append([f"{NUM_ROWS}, {case['kind']}", *times, *ratios])
    headings = ("rows", "before, ms", "after, ms", "after / before", "by round")
    run.console.print(table("decode step, medians", headings, rows))
    workload = {name: getattr(parsed, name) for name in ("model", "rounds", "steps", "threads")}
    workload |= {"rows": NUM_ROWS, "prompt": PROMPT}
    run.write({"before": commit(checkouts[0]), "workload": workload, "cases": cases})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
