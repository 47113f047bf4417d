from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora.variants import calculate_alora_offsets

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.decoder.decoder import Decoder, HeadAdapters
from loramux.engine.decoder.vocabularies import FORBIDDEN
from loramux.engine.device.backend import Backend
from loramux.engine.execution.executor import Forward
from loramux.engine.loop.assembly import AssembledEngine, assemble_engine
from loramux.engine.loop.config import EngineConfig, pack_target
from loramux.engine.loop.engine import Engine
from loramux.engine.protocol.messages import Add, Finished, Load
from loramux.engine.sequences.batch import Batch
from tests.conformance.tiny_models import (
    PLANS,
    SHAPE,
    WINDOW,
    AdapterPlan,
    add_adapters,
    make_base,
    pack_peft_directory,
)

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Subject:
    directory: Path
    reference: Any
    digests: dict[str, str]
    adapters: dict[str, PackedAdapter]
    num_pages: dict[str, int]

    def assemble(self, backend: Backend | None = None, **settings: Any) -> AssembledEngine:
        config = EngineConfig(
            model_dir=str(self.directory),
            blob_url="",
            dtype="float32",
            **{
                "cache_dir": "",
                "pool_bytes": 96 << 20,
                "max_batch_tokens": 64,
                "max_sequences": 16,
                "num_threads": 1,
                **settings,
            },
        )
        return assemble_engine(config, lambda: None, MemoryStager(self.adapters), backend=backend)

    @torch.no_grad()
    def reference_logits(self, name: str | None, tokens: list[int], num_prompt: int | None = None) -> torch.Tensor:
        """The reference's logits for every position, float32 `[len(tokens), vocab_size]`.

        An activated adapter is activated where peft finds its invocation in the first `num_prompt` tokens, or in all.
        """
        settings: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            if name is None:
                stack.enter_context(self.reference.disable_adapter())
            else:
                self.reference.set_adapter(name)
                if self.reference.peft_config[name].alora_invocation_tokens:
                    start = self.activation(name, tokens[:num_prompt])
                    settings["alora_offsets"] = [None if start is None else len(tokens) - start]
            logits: torch.Tensor = self.reference(input_ids=torch.tensor([tokens]), **settings).logits[0]
            return logits

    def activation(self, name: str, prompt: list[int]) -> int | None:
        """The position from which peft applies an activated adapter, or None."""
        [offset] = calculate_alora_offsets(self.reference.peft_config, name, torch.tensor([prompt]))
        return None if offset is None else len(prompt) - offset


def make_subject(
    family: str,
    directory: Path,
    plans: Sequence[AdapterPlan] = PLANS,
    shape: dict[str, Any] = SHAPE,
    window: int = WINDOW,
) -> Subject:
    base = make_base(family, directory / "base", shape, window)
    config = ModelConfig.load(directory / "base")
    plans = [plan.for_family(family) for plan in plans]
    if config.mixture is not None:
        plans = [plan.for_experts(base) for plan in plans]
    reference = add_adapters(base, plans, directory / "adapters")
    target = pack_target(config, "float32")
    packed = {
        plan.name: pack_peft_directory(directory / "adapters" / plan.name, target, directory / "base") for plan in plans
    }
    return Subject(
        directory / "base",
        reference,
        {name: one.digest for name, one in packed.items()},
        {one.digest: one for one in packed.values()},
        {name: one.num_pages for name, one in packed.items()},
    )


class Recorder:
    """An executor that records each batch, its logits, and the logits of each sampled token."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = engine
        self.executor = engine._executor
        self.steps: list[tuple[Batch, torch.Tensor]] = []
        self.by_sequence: dict[str, list[torch.Tensor]] = defaultdict(list)
        engine._executor = self
        compute = Decoder.logits
        self._logits = torch.empty(0)

        def recording(
            decoder: Decoder,
            hidden: torch.Tensor,
            adapters: HeadAdapters | None = None,
            product: torch.Tensor | None = None,
        ) -> torch.Tensor:
            logits = compute(decoder, hidden, adapters, product)
            self._logits = logits.to("cpu", torch.float32, copy=True)
            return logits

        monkeypatch.setattr(Decoder, "logits", recording)

    def submit(self, batch: Batch) -> Forward:
        forward = self.executor.submit(batch)
        self.steps.append((batch, self._logits))
        # Each sequence has its own random stream, so the seed identifies the sequence.
        ids = {one.seed: one.sequence_id for one in self._engine._live}
        for row, sample in zip(self._logits, batch.samples, strict=True):
            self.by_sequence[ids[sample.seed]].append(row)
        return forward


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    for outbound in engine.take_outbox():
        if isinstance(outbound.message, Finished):
            assert outbound.message.reason == "length", outbound.message


def load(engine: Engine, digests: Iterable[str]) -> None:
    """Load adapters before any request, so that one step can have all of them however long copies take."""
    for digest in digests:
        engine.load(b"", Load(call_id=digest, digest=digest))
    run(engine)


def assert_parity(
    subject: Subject, name: str | None, add: Add, recorded: list[torch.Tensor], tolerance: float = TOLERANCE
) -> None:
    """Compare the logits and greedy choice of each step with the reference after the same tokens."""
    assert len(recorded) == add.max_tokens
    generated = [int(row.argmax()) for row in recorded]
    num_prompt = len(add.prompt)
    expected = subject.reference_logits(name, [*add.prompt, *generated[:-1]], num_prompt)[num_prompt - 1 :]
    for row, theirs in zip(recorded, expected, strict=True):
        # A row cannot choose the tokens that other adapters in the step add.
        ours, others = row.split((len(theirs), len(row) - len(theirs)))
        assert (others == FORBIDDEN).all(), add.sequence_id
        limit = tolerance * theirs.abs().max()
        difference = (ours - theirs).abs().max()
        assert difference <= limit, f"{add.sequence_id}: {difference:.2e} over {limit:.2e}"
        best = theirs.topk(2).values
        if best[0] - best[1] > limit:
            assert ours.argmax() == theirs.argmax(), add.sequence_id
