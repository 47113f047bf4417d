"""Directories as training programs write them are served equal to PEFT, or refused with the sentence that helps.

Each program's recipes describe what it writes, from its sources. The files are made here.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.admin.check.adapter_check import check_directory, check_gguf
from loramux.admin.check.verdict import CheckVerdict
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import pack_target
from loramux.engine.protocol.messages import Add, SamplingParams
from tests.conformance.parity import Recorder, Subject, assert_parity, run
from tests.conformance.tiny_models import VOCAB_SIZE, pack_peft_directory
from tests.conformance.trainers.axolotl import AXOLOTL
from tests.conformance.trainers.llama_factory import LLAMA_FACTORY
from tests.conformance.trainers.ms_swift import MS_SWIFT
from tests.conformance.trainers.nemo import NEMO
from tests.conformance.trainers.recipe import Recipe, Refusal, make_trainer_base
from tests.conformance.trainers.torchtune import TORCHTUNE
from tests.conformance.trainers.trl import TRL
from tests.conformance.trainers.unsloth import UNSLOTH

# peft and transformers warn about much that these adapters do on purpose.
pytestmark = pytest.mark.filterwarnings("ignore")

PROGRAMS: dict[str, list[Recipe]] = {
    "unsloth": UNSLOTH,
    "axolotl": AXOLOTL,
    "llama_factory": LLAMA_FACTORY,
    "trl": TRL,
    "ms_swift": MS_SWIFT,
    "torchtune": TORCHTUNE,
    "nemo": NEMO,
}
NUM_TOKENS = 3
FEW = (
    "unsloth 2025.10: new tokens",
    "axolotl 0.9.2: FSDP",
    "LLaMA-Factory 0.9.3: full fine-tuning",
    "TRL 0.16.1: rank and alpha by module",
    "ms-swift 2.4: the output directory",
    "torchtune 0.4: q, v and output",
    "NeMo Automodel 0.4: DoRA on a quantised base",
)
"""The directories that every test run checks, all of one base."""


def by_base(names: Collection[str] | None = None) -> dict[str, list[Recipe]]:
    """The recipes, or those with some names, by base."""
    found: dict[str, list[Recipe]] = defaultdict(list)
    for recipes in PROGRAMS.values():
        for recipe in recipes:
            if names is None or recipe.name in names:
                found[recipe.base].append(recipe)
    return found


@dataclass(frozen=True)
class TrainerSubject(Subject):
    """A base with one reference per directory."""

    references: dict[str | None, Any] = field(default_factory=dict)

    @torch.no_grad()
    def reference_logits(self, name: str | None, tokens: list[int], num_prompt: int | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.references[name](input_ids=torch.tensor([tokens])).logits[0]
        return logits

    def add(self, name: str, seed: int) -> Add:
        vocab_size = self.adapters[self.digests[name]].layout.rows.vocab_size
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(3, VOCAB_SIZE, (4 + seed % 11,), generator=generator).tolist()
        return Add(
            sequence_id=name,
            prompt=(*prompt, *range(VOCAB_SIZE, vocab_size or VOCAB_SIZE)),
            max_tokens=NUM_TOKENS,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            digest=self.digests[name],
            vocab_size=vocab_size,
        )


def checked(path: Path, base_dir: Path) -> CheckVerdict:
    """Check a path as `loramux check` does."""
    return check_directory(path, base_dir, "float32") if path.is_dir() else check_gguf(path, base_dir, "float32")


def compare(recipes: list[Recipe], directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """Compare the directories of recipes for one base. Return the outcomes by program."""
    family = recipes[0].base
    base = make_trainer_base(family, directory / "base")
    base_dir, target = directory / "base", pack_target(ModelConfig.load(directory / "base"), "float32")
    subject = TrainerSubject(base_dir, None, {}, {}, {}, {None: base})
    problems = []
    for index, recipe in enumerate(recipes):
        trained = recipe.train(base)
        path = recipe.save(trained, base_dir, directory / str(index))
        verdict = checked(path, base_dir)
        problem = unexpected(recipe, verdict)
        if problem is not None:
            problems.append(problem)
        elif recipe.is_classifier:
            assert verdict.facts["task"]["labels"] == ["LABEL_0"]
        elif recipe.refusal is None:
            serve(subject, recipe.name, path, target, base_dir)
            subject.references[recipe.name] = recipe.reference(trained, base, path)
    assembled = subject.assemble(
        max_sequences=max(16, len(subject.digests)),
        max_resident_adapters=max(16, len(subject.digests)),
        max_batch_tokens=2048,
        pool_bytes=512 << 20,
    )
    recorder = Recorder(assembled.engine, monkeypatch)
    adds = {name: subject.add(name, seed) for seed, name in enumerate(subject.digests)}
    for add in adds.values():
        assembled.engine.add(b"", add)
    run(assembled.engine)
    for name, add in adds.items():
        assert_parity(subject, name, add, recorder.by_sequence[name])
    assembled.engine.check_integrity()
    assembled.adapters.close()
    assert not problems, "\n".join(problems)
    return outcomes(recipes)


def unexpected(recipe: Recipe, verdict: CheckVerdict) -> str | None:
    """Describe a verdict that is not the expected one, or return None."""
    found = [Refusal(one.code, one.message.replace(verdict.path, "{path}"), one.param) for one in verdict.problems]
    wanted = [] if recipe.refusal is None else [recipe.refusal]
    warned = sorted(warning.code for warning in verdict.warnings)
    if found == wanted and (found or warned == sorted(recipe.warnings)):
        return None
    return f"{recipe.name}: {found or warned}, not {wanted or recipe.warnings}"


def serve(subject: TrainerSubject, name: str, path: Path, target: PackTarget, base_dir: Path) -> None:
    packed = pack_peft_directory(path, target, base_dir)
    subject.digests[name], subject.adapters[packed.digest] = packed.digest, packed
    subject.num_pages[name] = packed.num_pages


def outcomes(recipes: list[Recipe]) -> dict[str, Counter[str]]:
    programs = {recipe.name: program for program, made in PROGRAMS.items() for recipe in made}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for recipe in recipes:
        counts[programs[recipe.name]]["served" if recipe.refusal is None else f"refused: {recipe.refusal.code}"] += 1
    return counts


@pytest.fixture(scope="module")
def counts() -> Iterator[dict[str, Counter[str]]]:
    """The outcomes by program, which are written to a file if the environment names one."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    yield found
    if path := os.environ.get("LORAMUX_TRAINER_COUNTS"):
        document = {program: dict(sorted(found[program].items())) for program in PROGRAMS}
        Path(path).write_text(json.dumps(document, indent=2) + "\n")


def test_recipes_are_many_and_their_names_are_unique() -> None:
    names = [recipe.name for recipes in PROGRAMS.values() for recipe in recipes]
    assert len(set(names)) == len(names) >= 200
    assert set(FEW) <= set(names)


def test_a_few_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [recipes] = by_base(FEW).values()
    compare(recipes, tmp_path, monkeypatch)


def test_every_sentence_of_a_refusal(tmp_path: Path) -> None:
    recipes = {recipe.refusal: recipe for recipe in by_base()["llama"] if recipe.refusal is not None}
    base, base_dir = make_trainer_base("llama", tmp_path / "base"), tmp_path / "base"
    problems = []
    for index, recipe in enumerate(recipes.values()):
        path = recipe.save(recipe.train(base), base_dir, tmp_path / str(index))
        problems.append(unexpected(recipe, checked(path, base_dir)))
    assert problems == [None] * len(recipes)
    assert recipes.keys() == {recipe.refusal for made in PROGRAMS.values() for recipe in made if recipe.refusal}


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("base", sorted(by_base()))
def test_every_directory(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: dict[str, Counter[str]]
) -> None:
    for program, found in compare(by_base()[base], tmp_path, monkeypatch).items():
        counts[program] += found
