"""Measures how much faster or slower decoding is with drafts.

The same engine answers the same requests in turn with and without drafts, and their decode times are compared. All
answers must be the same. There are seven kinds of work:

    copy             one greedy request that goes on with a file that its prompt contains
    prediction       one greedy request with its answer as the prediction, in which one token of twenty is changed
    chat             one sampled request
    four chats       four sampled requests at once
    sixteen chats    sixteen sampled requests at once, in whose steps there are no drafts
    schema           one greedy request with a schema, which forces many tokens
    sixteen schemas  sixteen sampled requests with this schema at once

Requests with a schema are compared with requests for as many tokens without a schema. Their answers must be the same
with forced tokens and without. By default, the base is a random model, whose sampled answers repeat nothing, and which
has no tokenizer. Copies and schemas need one.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.answers import CheckError
from benchmarks.harness import SCRATCH, begin, new_parser, reports_failure, rotated
from benchmarks.random_model import SHAPES, make_base
from benchmarks.running_engine import GREEDY, RunningEngine, start_engine
from benchmarks.tables import table
from loramux.adapter_store.formats.files.file_names import TOKENIZER_FILE
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.architectures.gguf_model import model_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.constraints.constraint_grammar import constraint_grammar
from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.messages import Add, DraftCounts, SamplingParams, StepOutput
from loramux.engine.text.text_tokenizer import TextTokenizer, load_tokenizer

GOALS = {
    "copy": 1.5,
    "prediction": 1.5,
    "chat": 1.0,
    "four chats": 0.97,
    "sixteen chats": 0.97,
    "schema": 1.2,
    "sixteen schemas": 0.95,
}
"""The lowest ratios of speed with drafts to speed without. For schemas, the lowest ratios to speed without a schema."""

SCHEMAS = ("schema", "sixteen schemas")
NEED_TOKENIZER = ("copy", *SCHEMAS)

NUM_REQUESTS = {"four chats": 4, "sixteen chats": 16, "sixteen schemas": 16}
"""Number of requests at once, if it is not 1."""

ORDERS = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "order_id": {"type": "integer", "minimum": 1, "maximum": 99_999},
            "customer_name": {"type": "string", "maxLength": 24},
            "shipping_city": {"type": "string", "maxLength": 16},
            "payment_method": {"enum": ["credit_card", "bank_transfer", "cash_on_delivery"]},
            "total_amount": {"type": "integer", "minimum": 0, "maximum": 9_999},
            "is_delivered": {"type": "boolean"},
        },
        "required": ["order_id", "customer_name", "shipping_city", "payment_method", "total_amount", "is_delivered"],
        "additionalProperties": False,
    },
}
"""A schema of records with six short values each, whose documents are all longer than any answer of the benchmark."""

PROMPT = 64
CHANGED = 20
"""One of this many tokens of a prediction is changed."""

WITH, WITHOUT, UNFORCED = "with drafts", "without", "schema without forced tokens"

QUESTIONS = (
    "How do I keep basil alive on a windowsill in winter?",
    "Explain to a child why the sky is blue.",
    "Which questions should I ask before I rent a flat?",
    "Write a short letter to a friend who has moved to another town.",
    "What is the difference between a library and a framework?",
    "Plan a weekend in a small city by the sea.",
)


def file_to_copy(number: int) -> str:
    """A short program. Each `number` gives another one."""
    dice = random.Random(number)
    names = dice.sample(["total", "price", "count", "weight", "length", "offset", "limit", "rate", "delay"], 6)
    functions = [
        f"def scaled_{name}(values, factor={dice.randint(2, 90)}):\n"
        f"    {name} = sum(values) * factor\n    return {name} / {dice.randint(2, 90)}\n"
        for name in names
    ]
    return "\n".join(functions)


@dataclass(frozen=True, slots=True)
class Work:
    """The requests of one round by kind, without their predictions."""

    tokenizer: TextTokenizer | None
    vocab_size: int
    num_tokens: int

    def requests(self, kind: str, seed: int) -> list[Add]:
        count = NUM_REQUESTS.get(kind, 1)
        is_greedy = kind in ("copy", "prediction", "schema")
        grammar = constraint_grammar("json_schema", json.dumps(ORDERS)) if kind in SCHEMAS else ""
        adds = []
        for index in range(count):
            sampling = GREEDY if is_greedy else SamplingParams(temperature=0.8, seed=seed + index, ignore_eos=True)
            prompt = self._prompt(kind, seed + index)
            add = Add(
                sequence_id=str(index), prompt=prompt, max_tokens=self.num_tokens, sampling=sampling, grammar=grammar
            )
            adds.append(add)
        return adds

    def _prompt(self, kind: str, seed: int) -> tuple[int, ...]:
        if self.tokenizer is None:
            dice = random.Random(seed)
            return tuple(dice.randrange(10, self.vocab_size) for _ in range(PROMPT))
        if kind == "copy":
            text = file_to_copy(seed)
            return self.tokenizer.encode(f"A file:\n\n{text}\nThe same file again:\n\n{text[:40]}")
        if kind in SCHEMAS:
            return self.tokenizer.encode(f"Orders of shop {seed}, as a list in JSON:\n\n")
        return self.tokenizer.encode(f"Question: {QUESTIONS[seed % len(QUESTIONS)]}\nAnswer ({seed}):")


def changed(tokens: Sequence[int], vocab_size: int, seed: int) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(10, vocab_size) if dice.randrange(CHANGED) == 0 else token for token in tokens)


def decode(engine: RunningEngine, adds: Sequence[Add]) -> tuple[float, dict[str, list[int]]]:
    """Seconds from the first tokens of all requests to the last, and the answers. Prompts are not in the time."""
    answers: dict[str, list[int]] = {add.sequence_id: [] for add in adds}
    for add in adds:
        engine.add(add)
    started = None
    while engine.num_sequences:
        for outbound in engine.step():
            if isinstance(outbound.message, StepOutput):
                for output in outbound.message.outputs:
                    answers[output.sequence_id].extend(output.token_ids)
        if started is None and all(answers.values()):
            started = time.perf_counter()
    assert started is not None
    return time.perf_counter() - started, answers


def measure_kind(engine: RunningEngine, work: Work, kind: str, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {}
    # The first round loads everything, and teaches the engine what rows cost. It is checked, too, but not counted.
    for number in range(-1, rounds):
        plain = [msgspec.structs.replace(add, speculates=False) for add in work.requests(kind, 1000 * (number + 1))]
        drafted = [msgspec.structs.replace(add, speculates=True) for add in plain]
        if kind == "prediction":
            _, answers = decode(engine, plain)
            predictions = [changed(answers[add.sequence_id], work.vocab_size, number) for add in drafted]
            drafted = [
                msgspec.structs.replace(add, prediction=one) for add, one in zip(drafted, predictions, strict=True)
            ]
        ways: dict[str, Sequence[Add]] = {WITH: drafted, WITHOUT: plain}
        if kind in SCHEMAS:
            ways |= {WITHOUT: [msgspec.structs.replace(add, grammar="") for add in plain], UNFORCED: plain}
        found = {}
        for way in rotated(list(ways), number + 1):
            taken, found[way] = decode(engine, ways[way])
            if number >= 0:
                seconds.setdefault(way, []).append(taken)
        if found[WITH] != found[UNFORCED if kind in SCHEMAS else WITHOUT]:
            raise CheckError(f"{kind}: answers differ with drafts")
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    # The engine answers the same requests in both ways, one right after the other.
    ratio = statistics.median(one / other for one, other in zip(seconds[WITHOUT], seconds[WITH], strict=True))
    return {"seconds": seconds, "medians_s": medians, "speedup": round(ratio, 3), "goal": GOALS[kind]}


def measure(engine: RunningEngine, work: Work, rounds: int, kinds: Sequence[str]) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for kind in kinds:
        if kind in NEED_TOKENIZER and work.tokenizer is None:
            continue
        before = counted(engine.stats().drafts)
        case = measure_kind(engine, work, kind, rounds)
        after = counted(engine.stats().drafts)
        cases[kind] = case | {"drafted_tokens": after[0] - before[0], "accepted_tokens": after[1] - before[1]}
    return cases


def counted(drafts: DraftCounts) -> tuple[int, int]:
    """The numbers of drafted and of accepted tokens, from all sources."""
    drafted = drafts.text_tokens + drafts.prediction_tokens + drafts.head_tokens + drafts.drafter_tokens
    accepted = drafts.accepted_text_tokens + drafts.accepted_prediction_tokens + drafts.accepted_head_tokens
    drafted += drafts.grammar_tokens
    accepted += drafts.accepted_drafter_tokens + drafts.accepted_grammar_tokens
    return drafted, accepted


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("speculation", __doc__)
    add = parser.add_argument
    add("--base", type=Path, help="directory or GGUF file of a base (default: a random model)")
    add("--size", choices=sorted(SHAPES), default="1b", help="shape of the random model")
    add("--kinds", nargs="+", choices=list(GOALS), default=list(GOALS), help="kinds of work (default: all)")
    add("--tokens", type=int, default=128, help="tokens of each answer")
    add("--rounds", type=int, default=7, help="measured rounds of each kind of work")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    run = begin(parser.parse_args(argv))
    arguments = run.arguments
    if arguments.base is None:
        arguments.base = SCRATCH / "speculation" / arguments.size
        make_base(SHAPES[arguments.size], arguments.base)
    else:
        arguments.size = None
    directory = model_directory(arguments.base)
    tokenizer_file = directory / TOKENIZER_FILE
    config = EngineConfig(
        model_dir=str(directory),
        blob_url="",
        cache_dir="",
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        speculate="text",
    )
    work = Work(
        TextTokenizer(load_tokenizer(tokenizer_file)) if tokenizer_file.exists() else None,
        ModelConfig.load(directory).vocab_size,
        arguments.tokens,
    )
    with start_engine(config, MemoryStager({})) as engine:
        cases = measure(engine, work, arguments.rounds, arguments.kinds)
    rows = [
        [
            kind,
            *(f"{1e3 * case['medians_s'][way]:.0f} ms" for way in (WITHOUT, WITH)),
            f"{case['speedup']:.2f}",
            f">= {case['goal']:.2f}",
            "met" if case["speedup"] >= case["goal"] else "missed",
            f"{case['accepted_tokens']} of {case['drafted_tokens']}",
        ]
        for kind, case in cases.items()
    ]
    header = ("work", WITHOUT, WITH, "times as fast", "goal", "", "drafts accepted")
    run.console.print(table("decode time of the answers, median", header, rows))
    names = ("size", "tokens", "rounds", "dtype", "threads")
    workload = {name: getattr(arguments, name) for name in names} | {"base": arguments.base.name}
    run.write({"workload": workload, "cases": cases})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
