"""Logits and greedy tokens equal those of transformers and peft, one request a time and in one mixed batch."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.engine.assembly import AssembledEngine, assemble_engine
from loramux.engine.batch import Batch
from loramux.engine.config import EngineConfig, pack_target
from loramux.engine.engine import Engine
from loramux.engine.messages import Add, Finished, SamplingParams, StatsRequest
from loramux.engine.model_config import ModelConfig
from loramux.engine.sequence import Sequence
from tests.conformance.tiny_models import PLANS, VOCAB_SIZE, MemorySource, add_adapters, make_base, pack_peft_directory

FAMILIES = ["llama", "llama-tied-bias-llama3-rope", "mistral-window", "qwen2", "qwen3"]
PROMPT_LENGTHS = [1, 7, 16, 17, 33, 64, 65, 100, 200, 333, 512, 600]
FEW_TOKENS = 6
MANY_TOKENS = 45
"""Enough that the first sequence still runs when the last prompt is through, so that all meet in one step."""
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Subject:
    """A base model on disk, its peft twin, and the packed adapters by name."""

    directory: Path
    reference: Any
    digests: dict[str, str]
    source: MemorySource
    num_pages: dict[str, int]

    def assemble(self) -> AssembledEngine:
        config = EngineConfig(
            model_dir=str(self.directory),
            blob_url="",
            cache_dir="",
            dtype="float32",
            pool_bytes=96 << 20,
            max_batch_tokens=64,
            max_sequences=16,
        )
        return assemble_engine(config, lambda: None, self.source)

    @torch.no_grad()
    def reference_logits(self, name: str | None, tokens: list[int]) -> torch.Tensor:
        """Logits of every position, float32 `[len(tokens), vocab_size]`."""
        with contextlib.ExitStack() as stack:
            if name is None:
                stack.enter_context(self.reference.disable_adapter())
            else:
                self.reference.set_adapter(name)
            logits: torch.Tensor = self.reference(input_ids=torch.tensor([tokens])).logits[0]
            return logits


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp(request.param)
    base = make_base(request.param, directory / "base")
    reference = add_adapters(base, PLANS, directory / "adapters")
    target = pack_target(ModelConfig.load(directory / "base"), "float32")
    packed = {plan.name: pack_peft_directory(directory / "adapters" / plan.name, target) for plan in PLANS}
    return Subject(
        directory / "base",
        reference,
        {name: one.digest for name, one in packed.items()},
        MemorySource(list(packed.values())),
        {name: one.num_pages for name, one in packed.items()},
    )


@pytest.fixture
def logits_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """The logits that each sequence was sampled from."""
    import loramux.engine.engine as module

    recorded: dict[str, list[torch.Tensor]] = defaultdict(list)
    original = module.sample

    def recording(logits: torch.Tensor, sequences: list[Sequence], eos: tuple[int, ...]) -> Any:
        for row, sequence in zip(logits, sequences, strict=True):
            recorded[sequence.sequence_id].append(row.clone())
        return original(logits, sequences, eos)

    monkeypatch.setattr(module, "sample", recording)
    return recorded


def requests(subject: Subject, max_tokens: int) -> dict[str, tuple[str | None, Add]]:
    """One request for each adapter, and the others for the base; prompts of 1 to 600 tokens."""
    names: list[str | None] = [None, "r1", "r3", None, "r4", "r8", None, "r31", "by-layer", None, "r16", "r64"]
    generator = torch.Generator().manual_seed(11)
    made = {}
    for index, (name, length) in enumerate(zip(names, PROMPT_LENGTHS, strict=True)):
        prompt = torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()
        add = Add(
            sequence_id=f"{index}-{name}-{length}",
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            digest=None if name is None else subject.digests[name],
        )
        made[add.sequence_id] = (name, add)
    return made


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    for outbound in engine.take_outbox():
        if isinstance(outbound.message, Finished):
            assert outbound.message.reason == "length", outbound.message


def assert_parity(subject: Subject, name: str | None, add: Add, recorded: list[torch.Tensor]) -> None:
    """Compare each step's logits with the reference's on the tokens that were generated, and the greedy choices."""
    assert len(recorded) == add.max_tokens
    generated = [int(row.argmax()) for row in recorded]
    expected = subject.reference_logits(name, [*add.prompt, *generated[:-1]])[len(add.prompt) - 1 :]
    for ours, theirs in zip(recorded, expected, strict=True):
        limit = TOLERANCE * theirs.abs().max()
        difference = (ours - theirs).abs().max()
        assert difference <= limit, f"{add.sequence_id}: {difference:.2e} over {limit:.2e}"
        best = theirs.topk(2).values
        if best[0] - best[1] > limit:
            assert ours.argmax() == theirs.argmax(), add.sequence_id


def test_each_request_alone(subject: Subject, logits_of: dict[str, list[torch.Tensor]]) -> None:
    assembled = subject.assemble()
    for sequence_id, (name, add) in requests(subject, FEW_TOKENS).items():
        assembled.engine.add(b"", add)
        run(assembled.engine)
        assert_parity(subject, name, add, logits_of[sequence_id])
    assembled.loader.close()


def test_one_mixed_batch(subject: Subject, logits_of: dict[str, list[torch.Tensor]]) -> None:
    assembled = subject.assemble()
    asked = requests(subject, MANY_TOKENS)
    for _, add in asked.values():
        assembled.engine.add(b"", add)
    run(assembled.engine)
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, logits_of[sequence_id])
    stats = assembled.engine.stats(StatsRequest(call_id=""))
    assert stats.max_adapters_in_step == len(PLANS)
    # What is resident is what was packed, to the page.
    assert stats.num_adapter_pages == sum(subject.num_pages.values())
    assert stats.num_kv_pages == 0
    assembled.engine.check_integrity()
    assembled.loader.close()


class Recorder:
    """An executor that keeps each batch and its logits."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self.steps: list[tuple[Batch, torch.Tensor]] = []

    def execute(self, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.executor.execute(batch)
        self.steps.append((batch, logits.clone()))
        return logits


def test_base_rows_are_bit_equal_to_the_same_batch_without_adapters(subject: Subject) -> None:
    mixed, plain = subject.assemble(), subject.assemble()
    recorder = mixed.engine._executor = Recorder(mixed.engine._executor)
    for _, add in requests(subject, FEW_TOKENS).values():
        mixed.engine.add(b"", add)
    run(mixed.engine)
    num_compared = num_changed = 0
    for batch, logits in recorder.steps:
        without = Batch(
            tokens=batch.tokens,
            positions=batch.positions,
            slots=batch.slots.copy() * 0 - 1,
            attention=batch.attention,
            sample_rows=batch.sample_rows,
        )
        expected = plain.engine._executor.execute(without)
        for row, sample_row in enumerate(batch.sample_rows.tolist()):
            if batch.slots[sample_row] < 0:
                assert torch.equal(logits[row], expected[row])
                num_compared += 1
            else:
                num_changed += not torch.equal(logits[row], expected[row])
    assert num_compared == 4 * FEW_TOKENS
    assert num_changed == len(PLANS) * FEW_TOKENS
    mixed.loader.close()
    plain.loader.close()
