"""Measures how often drafts are right with a drafter that belongs to an adapter, and without.

The base is the demo base as a MiMo, with a head for drafts that this benchmark trains on the base's own answers. For
each adapter of the demo, `docs/examples/train_drafter.py` trains a drafter on the adapter's answers. Then the adapter
answers questions about other facts, once with its drafter and once without. All answers must be the same. Rows count as
free: the figures do not depend on the machine. No time is measured.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from benchmarks.answers import CheckError
from benchmarks.harness import begin, new_parser, reports_failure
from benchmarks.running_engine import start_engine
from benchmarks.tables import table
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.drafting.step_times import StepTimes
from loramux.engine.llm import LLM, SamplingParams
from loramux.engine.loop.config import EngineConfig, pack_target
from loramux.engine.offline.local_adapter import read_adapter
from loramux.engine.protocol.messages import Add, StepOutput
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.demo_models.facts import all_facts

REPOSITORY = Path(__file__).parent.parent
DEMO = REPOSITORY / "admin" / "demo"
SCRIPT = REPOSITORY / "docs" / "examples" / "train_drafter.py"
GREEDY = SamplingParams(temperature=0.0)
ADAPTERS = ("pirate", "formal", "json")
MAX_TOKENS = 48
HELD_OUT = 5
"""One fact of this many is asked only in the measurement."""

NUM_ASKED = 40
"""Number of questions of the measurement, for each adapter."""

HEAD_EPOCHS, HEAD_RATE = 3, 1e-3

Answer = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a prompt, and those of the answer."""


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(_parse(argv))
    given = run.arguments
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(given, Path(directory))
    shown = [
        [row["adapter"], *(f"{row[way]['accepted']} of {row[way]['drafted']}" for way in ("without", "with"))]
        for row in rows
    ]
    run.console.print(table("accepted drafts", ["adapter", "without a drafter", "with"], shown))
    workload = {"questions": given.questions, "drafter_epochs": given.epochs, "rank": given.rank}
    run.write({"model": "demo", "workload": workload, "adapters": rows})
    return 0


def measure(given: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    example = _example()
    adapters = {name: DEMO / "adapters" / name for name in given.adapters}
    trained, asked = questions()
    trained = trained[: given.questions]
    answers = answers_of(adapters, [None, *adapters], trained, given.threads)
    base = make_base(example, scratch / "base", answers[None])
    rows = []
    for name, directory in adapters.items():
        out = scratch / name
        # The script's own steps, without reading its command line.
        model = example.PeftModel.from_pretrained(example.load_base(base), directory).get_base_model()
        head = example.load_head(base, model.config)
        drafter = example.add_lora(head, given.rank)
        parameters = list(example.parameters_of(drafter))
        example.train(parameters, head, model, _examples(answers[name]), given.epochs, example.LEARNING_RATE)
        example.save(drafter, directory, out)
        figures, answered = {}, []
        for way, path in (("without", directory), ("with", out)):
            found, tokens = drafted(base, path, asked[:NUM_ASKED], given.threads)
            figures[way] = found
            answered.append(tokens)
        if answered[0] != answered[1]:
            raise CheckError(f"{name}: answers differ with the drafter")
        rows.append({"adapter": name, **figures})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def questions() -> tuple[list[str], list[str]]:
    """Questions for training and for the measurement, in an order that mixes the topics."""
    trained, asked = [], []
    for fact in all_facts():
        is_held_out = _number_of(fact.sentence) % HELD_OUT == 0
        (asked if is_held_out else trained).extend(fact.questions)
    return sorted(trained, key=_number_of), sorted(asked, key=_number_of)


def _number_of(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


def answers_of(
    adapters: Mapping[str, Path], names: Sequence[str | None], asked: Sequence[str], num_threads: int
) -> dict[str | None, list[Answer]]:
    """The greedy answers of the demo base and of its adapters."""
    prompts = prompts_of(asked)
    with LLM(
        DEMO / "base", adapters, device="cpu", dtype="float32", pool_bytes=256 << 20, num_threads=num_threads
    ) as llm:
        return {
            name: [
                (one.prompt_token_ids, one.token_ids)
                for one in llm.generate(prompts, adapter=name, max_tokens=MAX_TOKENS, sampling=GREEDY)
            ]
            for name in names
        }


def prompts_of(asked: Sequence[str]) -> list[tuple[int, ...]]:
    tokenizer = ModelTokenizer.load(DEMO / "base")
    template = tokenizer.chat_template
    assert template is not None, "the demo base has a chat template"
    return [tuple(tokenizer.encode_rendered(template.render([{"role": "user", "content": one}]))) for one in asked]


def make_base(example: ModuleType, directory: Path, answers: Sequence[Answer]) -> Path:
    """Write the demo base as a MiMo, whose q, k and v have biases, and train a head on these answers of the base."""
    shutil.copytree(DEMO / "base", directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace("weight", "bias")] = torch.zeros(len(tensors[name]), dtype=tensors[name].dtype)
    save_file(tensors, path)
    model = example.load_base(directory)
    head = example.Head(model.config)
    # The base's last layer is a better start than random weights.
    head.load_state_dict(model.model.layers[-1].state_dict(), strict=False)
    example.train(list(head.parameters()), head, model, _examples(answers), HEAD_EPOCHS, HEAD_RATE)
    own = {f"{example.PREFIX}.{name}": one.detach().contiguous() for name, one in head.state_dict().items()}
    save_file(tensors | own, path)
    return directory


def drafted(
    base: Path, adapter: Path, asked: Sequence[str], num_threads: int
) -> tuple[dict[str, int], list[list[int]]]:
    """The numbers of drafted and accepted tokens of the adapter's answers, one after another, and the answers."""
    config = EngineConfig(
        model_dir=str(base), blob_url="", cache_dir="", dtype="float32", num_threads=num_threads, speculate="head"
    )
    target = pack_target(ModelConfig.load(base), config.dtype)
    packed = read_adapter(adapter, target, BaseWeights(base), None, {}).packed
    answers = []
    with (
        patch.object(StepTimes, "ratio", lambda times, num_rows, num_more: 1.0),
        patch.object(StepTimes, "seconds", lambda times, num_rows: 0.0),
        start_engine(config, MemoryStager({packed.digest: packed})) as engine,
    ):
        for number, prompt in enumerate(prompts_of(asked)):
            engine.add(
                Add(
                    sequence_id=f"{number}",
                    prompt=prompt,
                    max_tokens=MAX_TOKENS,
                    sampling=GREEDY,
                    digest=packed.digest,
                )
            )
            outputs = [one for said in engine.finish() if isinstance(said, StepOutput) for one in said.outputs]
            answers.append([token for output in outputs for token in output.token_ids])
        drafts = engine.stats().drafts
    return {
        "drafted": drafts.head_tokens + drafts.drafter_tokens,
        "accepted": drafts.accepted_head_tokens + drafts.accepted_drafter_tokens,
    }, answers


def _examples(answers: Sequence[Answer]) -> list[tuple[torch.Tensor, int]]:
    return [(torch.tensor(prompt + answer), len(prompt)) for prompt, answer in answers if len(prompt + answer) > 3]


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("drafter", __doc__, is_timed=False)
    parser.add_argument("--adapters", nargs="+", choices=ADAPTERS, default=list(ADAPTERS))
    parser.add_argument("--questions", type=int, default=300, help="questions to train with")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of each drafter")
    parser.add_argument("--rank", type=int, default=16, help="rank of each drafter")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
