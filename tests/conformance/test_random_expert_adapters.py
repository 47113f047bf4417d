"""Random adapters of stacked experts and routers, which peft saves and reloads, give peft's logits."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import pack_target
from loramux.engine.protocol.messages import Add, SamplingParams
from tests.conformance.parity import TOLERANCE, Recorder, Subject, run
from tests.conformance.tiny_models import ATTENTION, SMALL_SHAPE, VOCAB_SIZE, make_base, pack_peft_directory

# peft warns about merging and about patterns for parameters, which it uses.
pytestmark = pytest.mark.filterwarnings("ignore")

FAMILY, EXPERT_LAYER = "qwen3-moe", 0
PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight", "self_attn.o_proj.weight")


def random_settings(chance: random.Random) -> dict[str, Any]:
    """A configuration that targets some of PARAMETERS, by short or full names, and perhaps attention."""

    def name(parameter: str) -> str:
        last = ".".join(parameter.split(".")[1:])
        return chance.choice([parameter, last, f"layers.{EXPERT_LAYER}.{parameter}"])

    chosen = chance.sample(PARAMETERS, chance.randint(1, len(PARAMETERS)))
    settings: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "r": chance.choice([1, 2, 5, 16]),
        "lora_alpha": chance.choice([1, 3, 8.5]),
        "use_rslora": chance.random() < 0.4,
        "target_parameters": [name(parameter) for parameter in chosen],
        "target_modules": chance.sample(ATTENTION[:3], chance.randint(0, 2)),
    }
    for key, values in (("rank_pattern", [1, 3, 9]), ("alpha_pattern", [2, 7])):
        if chance.random() < 0.6:
            named = chance.sample(chosen, chance.randint(1, len(chosen)))
            settings[key] = {name(parameter): chance.choice(values) for parameter in named}
    return settings


@torch.no_grad()
def reference_logits(base: Any, directory: Path, tokens: list[int]) -> torch.Tensor:
    model = PeftModel.from_pretrained(copy.deepcopy(base), directory).eval()
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0, -1]
    return logits


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 200), marks=pytest.mark.campaign)], ids=["few", "many"]
)
def test_random_parameters_give_pefts_logits(seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_base(FAMILY, tmp_path / "base", SMALL_SHAPE)
    target = pack_target(ModelConfig.load(tmp_path / "base"), "float32")
    subject = Subject(tmp_path / "base", None, {}, {}, {})
    assembled = subject.assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    for seed in seeds:
        chance, directory = random.Random(seed), tmp_path / str(seed)
        settings = random_settings(chance)
        torch.manual_seed(seed)
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**settings))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter) * 0.08
        model.save_pretrained(directory, save_embedding_layers=False)
        packed = pack_peft_directory(directory, target, tmp_path / "base")
        subject.adapters[packed.digest] = packed
        prompt = [chance.randrange(2, VOCAB_SIZE) for _ in range(9)]
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        add = Add(sequence_id=str(seed), prompt=tuple(prompt), max_tokens=1, sampling=sampling, digest=packed.digest)
        assembled.engine.add(b"", add)
        run(assembled.engine)
        expected = reference_logits(base, directory, prompt)
        difference = (recorder.by_sequence[str(seed)][0] - expected).abs().max() / expected.abs().max()
        assert difference <= TOLERANCE, f"{seed}: {difference:.2e} with {settings}"
    assembled.adapters.close()
