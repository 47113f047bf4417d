"""If both peft and loramux accept a random configuration, the engine's logits equal peft's.

Peft saves each configuration and reloads it as the reference. Our code processes it like an upload.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from loramux.adapter_store.errors import AdapterRejected
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import pack_target
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.engine.sequences.activation import activations
from tests.conformance.parity import TOLERANCE, Recorder, Subject, run
from tests.conformance.random_peft_configs import REFUSED, random_options
from tests.conformance.tiny_models import SMALL_SHAPE, VOCAB_SIZE, make_base, pack_peft_directory

# peft warns about merging, patterns that match nothing, and much else that these tests do on purpose.
pytestmark = pytest.mark.filterwarnings("ignore")

FEW, MANY = 8, 1000


@dataclass
class Pair:
    base: Any
    subject: Subject
    target: Any
    directory: Path

    def save(self, index: int, settings: dict[str, Any], dtype: torch.dtype, chance: random.Random) -> Path | None:
        """Save a random adapter with peft. Returns None if peft finds nothing to adapt."""
        directory = self.directory / str(index)
        torch.manual_seed(index)
        try:
            model = get_peft_model(copy.deepcopy(self.base), LoraConfig(**settings))
        except (ValueError, TypeError):
            return None
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.data = (parameter * (1 + 0.3 * torch.randn_like(parameter))).to(dtype)
            elif "lora_" in name:
                parameter.data = (torch.randn_like(parameter) * 0.08).to(dtype)
            elif parameter.requires_grad:
                parameter.data = (torch.randn_like(parameter) * 0.3).to(dtype)
        model.save_pretrained(directory, save_embedding_layers=chance.choice([False, "auto"]))
        return directory

    @torch.no_grad()
    def reference_logits(self, directory: Path, tokens: list[int]) -> torch.Tensor:
        """The logits of peft with the saved adapter at the last position, float32 `[vocab_size]`."""
        # Load into a copy, because a failed load leaves peft layers in the model.
        model = PeftModel.from_pretrained(copy.deepcopy(self.base), directory).eval()
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        return logits


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("differential")
    base = make_base("llama", directory / "base", SMALL_SHAPE)
    target = pack_target(ModelConfig.load(directory / "base"), "float32")
    return Pair(base, Subject(directory / "base", None, {}, {}, {}), target, directory)


def _label(option: str, value: Any) -> str:
    """Name the option, with its value if that is a word."""
    if not isinstance(value, str):
        return option
    return f"{option} (a regular expression)" if "*" in value else f"{option} {value}"


def compare(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, first: int, count: int
) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Compare configurations `[first, first + count)`, and count the outcomes, in total and by option."""
    outcomes, by_option = Counter[str](), defaultdict[str, Counter[str]](Counter)
    assembled = pair.subject.assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    largest = 0.0
    for index in range(first, first + count):
        chance = random.Random(index)
        settings, refused = random_options(chance)

        def count_outcome(outcome: str, settings: dict[str, Any] = settings) -> None:
            outcomes[outcome] += 1
            for name, value in settings.items():
                # Leave out options that are off.
                if value:
                    by_option[_label(name, value)][outcome] += 1

        dtype = chance.choice([torch.float32, torch.float16, torch.bfloat16])
        directory = pair.save(index, settings, dtype, chance)
        if directory is None:
            count_outcome("refused by peft when it was made")
            continue
        try:
            packed = pack_peft_directory(directory, pair.target, pair.directory / "base")
        except AdapterRejected as error:
            if refused is not None:
                if re.split(r"[\[.]", error.param or "")[0] != refused:
                    raise
                count_outcome("refused by name")
                continue
            # peft sorts the patterns when it saves them, and the first match counts. After reloading, the patterns may
            # give a rank that contradicts the tensors, and peft cannot load its own directory.
            if error.code != "rank_mismatch":
                raise
            with pytest.raises(RuntimeError, match="size mismatch"):
                PeftModel.from_pretrained(copy.deepcopy(pair.base), directory)
            count_outcome("refused by both")
            continue
        assert refused is None, f"{index}: {refused} was not refused: {settings}"
        prompt = [chance.randrange(2, VOCAB_SIZE) for _ in range(9)]
        tokens = settings.get("alora_invocation_tokens", [])
        if tokens and chance.random() < 0.8:
            place = chance.randrange(len(prompt))
            prompt[place:place] = tokens
        [position] = activations([prompt], tokens)
        outcomes["activated" if tokens and position is not None else "never activated" if tokens else "plain"] += 1
        pair.subject.adapters[packed.digest] = packed
        sequence_id = f"{index}"
        assembled.engine.add(
            b"",
            Add(
                sequence_id=sequence_id,
                prompt=tuple(prompt),
                max_tokens=1,
                sampling=SamplingParams(temperature=0.0, ignore_eos=True),
                digest=None if position is None else packed.digest,
                activation=position or 0,
            ),
        )
        run(assembled.engine)
        expected = pair.reference_logits(directory, prompt)
        difference = float((recorder.by_sequence[sequence_id][0] - expected).abs().max() / expected.abs().max())
        assert difference <= TOLERANCE, f"{index}: {difference:.2e} with {settings} in {dtype}"
        largest = max(largest, difference)
        count_outcome("equal")
    assembled.adapters.close()
    print(f"{dict(outcomes)}, largest relative difference {largest:.1e}")
    for option, counts in sorted(by_option.items()):
        print(f"  {option}: {dict(counts)}")
    return outcomes, by_option


def test_a_few_configurations_give_pefts_logits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, _ = compare(pair, monkeypatch, 0, FEW)
    assert outcomes["equal"] >= FEW // 3


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_a_thousand_configurations_give_pefts_logits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, by_option = compare(pair, monkeypatch, FEW, MANY)
    if path := os.environ.get("LORAMUX_PEFT_COUNTS"):
        counts = {"all": dict(outcomes), **{option: dict(by_option[option]) for option in sorted(by_option)}}
        Path(path).write_text(json.dumps(counts, indent=2) + "\n")
    assert outcomes["equal"] >= MANY * 0.5
    assert outcomes["activated"] > outcomes["never activated"] > 0
    for option in ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "alora_invocation_tokens"):
        assert by_option[option]["equal"] > MANY * 0.02, option
    for settings in REFUSED:
        name = next(iter(settings))
        assert sum(counts["refused by name"] for option, counts in by_option.items() if option.startswith(name)), name
