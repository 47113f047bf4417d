"""Random configurations that both peft and loramux accept give equal logits, from the saved directory to the engine.

Peft saves each configuration and reloads it as the reference. Our code processes it like an upload.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from loramux.adapter_store.errors import AdapterRejected
from loramux.engine.config import pack_target
from loramux.engine.messages import Add, SamplingParams
from loramux.engine.model.model_config import ModelConfig
from loramux.platform.generation.activation import activations
from tests.conformance.parity import TOLERANCE, Recorder, Subject, run
from tests.conformance.tiny_models import (
    ALL_LINEARS,
    SMALL_SHAPE,
    VOCAB_SIZE,
    make_base,
    pack_peft_directory,
)

pytestmark = [
    # peft's warnings about adapters of the head or embedding, and about patterns and exclusions that match nothing.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:The following .* keys did not match any targeted module:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:You have passed exclude_modules"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings("ignore:Adapter '.*LoRA tensor.s. have invalid shape"),
]

NUM_LAYERS = SMALL_SHAPE["num_hidden_layers"]
PARENTS = {name: "self_attn" if name in ALL_LINEARS[:4] else "mlp" for name in ALL_LINEARS}
FEW, MANY = 6, 300


def random_name(chance: random.Random) -> str:
    """A name for one or several modules, in any form that a configuration can use."""
    module = chance.choice(ALL_LINEARS)
    below = f"{PARENTS[module]}.{module}"
    layer = chance.randrange(NUM_LAYERS)
    return chance.choice([module, module, below, f"layers.{layer}.{below}", f"model.layers.{layer}.{below}"])


def random_settings(chance: random.Random) -> dict[str, Any]:
    """The settings of a random LoRA configuration that we support. Some configurations match no module at all."""
    settings: dict[str, Any] = {
        # Without a task type, PEFT writes an auto_mapping.
        "task_type": chance.choice(["CAUSAL_LM", None]),
        "fan_in_fan_out": chance.random() < 0.1,
        "r": chance.choice([1, 2, 3, 8, 16, 33]),
        "lora_alpha": chance.choice([1, 2, 7, 16, 0.5]),
        "use_rslora": chance.random() < 0.4,
        **chance.choice([{}, {}, {"use_dora": True}, {"lora_bias": True}]),
        "lora_dropout": chance.choice([0.0, 0.1]),
    }
    roll = chance.random()
    if roll < 0.15:
        settings["target_modules"] = "all-linear"
    elif roll < 0.35:
        names = "|".join(chance.sample(ALL_LINEARS, chance.randint(1, 4)))
        layers = chance.choice(["[0-9]+", f"{NUM_LAYERS - 1}", "(0|1)"])
        settings["target_modules"] = rf".*layers\.{layers}\..*\.({names})"
    else:
        names = [random_name(chance) for _ in range(chance.randint(1, 4))]
        if chance.random() < 0.3:
            names.append(chance.choice(["lm_head", "embed_tokens", "model.embed_tokens"]))
        settings["target_modules"] = names
    for key, values in (("rank_pattern", [1, 4, 5, 24]), ("alpha_pattern", [1, 3, 11])):
        if chance.random() < 0.5:
            names = [random_name(chance) for _ in range(chance.randint(1, 3))]
            settings[key] = {name: chance.choice(values) for name in names}
    if chance.random() < 0.2:
        settings.setdefault("rank_pattern", {})[rf"layers\.[01]\..*{chance.choice(ALL_LINEARS)[:-4]}.*"] = 7
    if chance.random() < 0.3:
        excluded = [random_name(chance) for _ in range(chance.randint(1, 2))]
        settings["exclude_modules"] = rf".*\.{chance.choice(ALL_LINEARS)}" if chance.random() < 0.3 else excluded
    # PEFT refuses `layers_to_transform` together with a regular expression.
    if chance.random() < 0.3 and not settings["target_modules"][0].startswith("."):
        settings["layers_to_transform"] = chance.choice([0, [1], [0, 1], [NUM_LAYERS - 1]])
        settings["layers_pattern"] = chance.choice([None, "layers", ["layers"]])
    # PEFT fails in the middle of an activated adapter of the embedding, and never activates one without a task type.
    can_be_activated = settings["task_type"] is not None and not settings.get("use_dora")
    if can_be_activated and not any("embed" in name for name in settings["target_modules"]) and chance.random() < 0.5:
        settings["alora_invocation_tokens"] = [chance.randrange(2, 5) for _ in range(chance.randint(1, 3))]
    elif chance.random() < 0.5:
        settings |= random_trained_parts(chance)
    return settings


def random_trained_parts(chance: random.Random) -> dict[str, Any]:
    """A trained head, embedding or tokens of either. PEFT refuses some of these combinations."""
    parts: dict[str, Any] = {}
    if chance.random() < 0.5:
        parts["modules_to_save"] = chance.choice([["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
    if chance.random() < 0.6:
        lists = [chance.sample(range(VOCAB_SIZE), chance.randint(1, 40)) for _ in range(2)]
        by_module = {"lm_head": lists[0], "embed_tokens": lists[1]}
        # PEFT notices that a module is named twice only if its name is the same.
        forms = [by_module, {name: by_module[name] for name in chance.sample(sorted(by_module), 1)}]
        if "embed_tokens" not in parts.get("modules_to_save", ()):
            forms.append(lists[0])
        parts["trainable_token_indices"] = chance.choice(forms)
    return parts


@dataclass
class Pair:
    base: Any
    subject: Subject
    target: Any
    directory: Path

    def save(self, index: int, settings: dict[str, Any], dtype: torch.dtype, chance: random.Random) -> Path | None:
        """Have peft save a random adapter with these settings. Returns None if peft finds nothing to adapt."""
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
        """peft's logits with the saved adapter, for the last position: float32 `[vocab_size]`."""
        # A load that fails leaves layers of peft's in the model, so load into a copy.
        model = PeftModel.from_pretrained(copy.deepcopy(self.base), directory).eval()
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        return logits


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("differential")
    base = make_base("llama", directory / "base", SMALL_SHAPE)
    target = pack_target(ModelConfig.load(directory / "base"), "float32")
    return Pair(base, Subject(directory / "base", None, {}, {}, {}), target, directory)


def compare(pair: Pair, monkeypatch: pytest.MonkeyPatch, first: int, count: int) -> Counter[str]:
    """Compare configurations `[first, first + count)`, and count the outcomes."""
    outcomes: Counter[str] = Counter()
    assembled = pair.subject.assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    largest = 0.0
    for index in range(first, first + count):
        chance = random.Random(index)
        settings = random_settings(chance)
        dtype = chance.choice([torch.float32, torch.float16, torch.bfloat16])
        directory = pair.save(index, settings, dtype, chance)
        if directory is None:
            outcomes["nothing to adapt"] += 1
            continue
        try:
            packed = pack_peft_directory(directory, pair.target, pair.directory / "base")
        except AdapterRejected as error:
            # peft sorts the patterns when it saves them, and the first match counts. After reloading, the patterns may
            # give a rank that differs from the tensors', and peft itself cannot load the directory.
            if error.code != "rank_mismatch":
                raise
            with pytest.raises(RuntimeError, match="size mismatch"):
                PeftModel.from_pretrained(copy.deepcopy(pair.base), directory)
            outcomes["refused by both"] += 1
            continue
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
        try:
            expected = pair.reference_logits(directory, prompt)
        except RuntimeError as error:
            # The patterns are sorted and include a regular expression. We take the ranks from the tensors.
            if "size mismatch" not in str(error) or not any("*" in name for name in settings["rank_pattern"]):
                raise
            outcomes["refused by peft"] += 1
            continue
        difference = float((recorder.by_sequence[sequence_id][0] - expected).abs().max() / expected.abs().max())
        assert difference <= TOLERANCE, f"{index}: {difference:.2e} with {settings} in {dtype}"
        largest = max(largest, difference)
        outcomes["equal"] += 1
        for name in ("modules_to_save", "trainable_token_indices"):
            outcomes[name] += name in settings
    assembled.adapters.close()
    print(f"{dict(outcomes)}, largest relative difference {largest:.1e}")
    return outcomes


def test_a_few_configurations_give_pefts_logits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = compare(pair, monkeypatch, 0, FEW)
    assert outcomes["equal"] >= FEW // 2


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_hundreds_of_configurations_give_pefts_logits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = compare(pair, monkeypatch, FEW, MANY)
    assert outcomes["equal"] >= MANY * 0.8
    assert outcomes["activated"] > outcomes["never activated"] > 0
    assert min(outcomes["modules_to_save"], outcomes["trainable_token_indices"]) > MANY * 0.05
