"""The examples in docs/examples run as their first lines say."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest
from peft import LoraConfig, PeftModel
from torch import nn

from loramux.adapter_store.validation.validation import validate_files
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.llm import LLM
from loramux.engine.loop.config import pack_target
from tests.conformance.draft_heads import add_head
from tests.conformance.tiny_models import SMALL_SHAPE, AdapterPlan, add_adapters, make_base
from tests.demo_base import DEMO_BASE
from tests.docs.write import DOCS

EXAMPLES = DOCS / "examples"
ADAPTERS = DEMO_BASE.parent / "adapters"


class Run(Protocol):
    def __call__(self, name: str, *arguments: Path) -> str: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example with these arguments and returns what it printed."""

    def run(name: str, *arguments: Path) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_tested() -> None:
    tested = re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text())
    assert sorted(tested) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_mixed_adapters(run: Run, tmp_path: Path) -> None:
    # Directories of checkpoints often have equal names.
    directories = [tmp_path / run_name / "checkpoint-500" for run_name in ("a", "b")]
    for directory, name in zip(directories, ("pirate", "json"), strict=True):
        shutil.copytree(ADAPTERS / name, directory)
    output = run("mixed_adapters.py", DEMO_BASE, *directories)
    answers = dict(re.findall(r"^(.+?): (.+)$", output, re.MULTILINE))
    assert list(answers) == ["base", *map(str, directories)]
    assert all("Paris" in answer for answer in answers.values())
    assert answers["base"] == "The capital of France is Paris."


def test_rank_sweep(run: Run, tmp_path: Path) -> None:
    lines = ["Arr, matey! The capital o' France be Paris.", "The capital of Italy is Rome."]
    (tmp_path / "texts").write_text("\n".join(lines))
    output = run("rank_sweep.py", DEMO_BASE, tmp_path / "texts", ADAPTERS / "pirate", ADAPTERS / "formal")
    found = re.findall(r"^(\S+) +rank +(\S+) +perplexity ([0-9.]+)$", output, re.MULTILINE)
    with LLM(DEMO_BASE, {name: ADAPTERS / name for name in ("pirate", "formal")}) as llm:
        for adapter, (name, rank, perplexity) in zip((None, *llm.adapters), found, strict=True):
            scores = llm.score(lines, adapter=adapter)
            logprobs = [one for score in scores for one in score.logprobs if one is not None]
            assert name == (str(ADAPTERS / adapter) if adapter else "base")
            assert rank == {None: "-", "pirate": "8", "formal": "4"}[adapter]
            assert float(perplexity) == pytest.approx(math.exp(-statistics.mean(logprobs)), abs=2e-3)


def test_evaluate_adapter(run: Run, tmp_path: Path) -> None:
    cases = [{"prompt": "What is the capital of France?", "expected": one} for one in ("Paris", "Arr")]
    (tmp_path / "questions").write_text("\n".join(map(json.dumps, cases)))
    output = run("evaluate_adapter.py", DEMO_BASE, ADAPTERS / "pirate", tmp_path / "questions")
    assert output == "base: 1 of 2\nadapter: 2 of 2\n"


def test_notebook(run: Run) -> None:
    output = run("notebook.py", DEMO_BASE, ADAPTERS / "pirate")
    streamed, base, trained = output.splitlines()
    assert streamed == "The capital of France is Paris."
    assert base == f"None: {streamed}"
    assert trained.startswith("trained: Arr, matey!")


@pytest.mark.parametrize(
    "trained",
    [
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"trainable_token_indices": {"embed_tokens": [2], "lm_head": [2]}},
    ],
    ids=["LoRA", "weights", "tokens"],
)
def test_a_drafter_learns_from_the_bases_own_embedding_and_output(trained: dict[str, Any]) -> None:
    own_layer = runpy.run_path(str(EXAMPLES / "train_drafter.py"))["own_layer"]
    layers = {"embed_tokens": nn.Embedding(5, 4), "lm_head": nn.Linear(4, 5, bias=False)}
    base = nn.ModuleDict({**layers, "q_proj": nn.Linear(4, 4)})
    wrapped = PeftModel(base, LoraConfig(**{"target_modules": ["q_proj"], **trained})).get_base_model()
    for name, layer in layers.items():
        found = own_layer(wrapped[name])
        assert type(found) is type(layer)
        assert found.weight is layer.weight


def test_train_drafter(run: Run, tmp_path: Path) -> None:
    """The saved adapter fits the base, and the engine uses its drafter."""
    base, adapter, out = tmp_path / "base", tmp_path / "adapters" / "r4", tmp_path / "out"
    shape = {**SMALL_SHAPE, "hidden_size": 64, "intermediate_size": 96}
    plan = AdapterPlan("r4", 4, ["q_proj", "down_proj"], use_rslora=True, rank_pattern={"down_proj": 2})
    add_adapters(make_base("mimo", base, shape), [plan], tmp_path / "adapters")
    add_head(base)
    examples = [{"prompt": [2, 3, 4], "answer": [number, 7, 8, 9] * 3} for number in range(2)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, examples)))
    losses = re.findall(r"loss ([0-9.]+)", run("train_drafter.py", base, adapter, tmp_path / "answers.jsonl", out))
    assert float(losses[-1]) < float(losses[0])
    target = pack_target(ModelConfig.load(base), "float32")
    report = validate_files((out / "adapter_config.json").read_bytes(), out / "adapter_model.safetensors", target)
    assert report.features == ("drafter",)
    # A drafter's products are not scaled, and the adapter's own ranks and scales stay.
    drafter = {module.name for module in target.draft_modules}
    assert {name: scale for name, scale in report.scales.items() if name in drafter} == dict.fromkeys(drafter, 1.0)
    assert report.scales["model.layers.0.self_attn.q_proj"] == 16 / 4**0.5
    assert report.scales["model.layers.0.mlp.down_proj"] == 16 / 2**0.5
