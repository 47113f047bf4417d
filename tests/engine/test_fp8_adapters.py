"""FP8 adapters in the pool: the answers equal those of PEFT with the same rounded matrices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.packed.fp8 import to_fp8_factors
from loramux.engine.llm import LLM, SamplingParams
from loramux.kernels.quantized import E4M3
from tests.conformance.demo_adapters import DEMO
from tests.demo_base import DEMO_BASE

ADAPTERS = {name: DEMO / "adapters" / name for name in ("formal", "json", "pirate")}
PROMPTS = ["What is the capital of France?", "Tell me about the sea.", "Who are you?"]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO_BASE, ADAPTERS, device="cpu", dtype="float32", pool_bytes=64 << 20, adapter_dtype="fp8") as opened:
        yield opened


@pytest.fixture(scope="module")
def rounded() -> Any:
    """PEFT with each A and B replaced by the values of its FP8 codes."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(ADAPTERS["pirate"]), "pirate")
    for name in ("formal", "json"):
        model.load_adapter(str(ADAPTERS[name]), name)
    with torch.no_grad():
        for layer in model.modules():
            for name in ADAPTERS if hasattr(layer, "lora_A") else ():
                if name in layer.lora_A:
                    A, B = layer.lora_A[name].weight, layer.lora_B[name].weight
                    codes = to_fp8_factors(A.numpy(), B.T.numpy())
                    A.copy_(torch.from_numpy(E4M3[codes.A]))
                    B.copy_(torch.from_numpy(E4M3[codes.B].T * codes.factor))
    return model.eval()


@torch.no_grad()
def log_probabilities(model: Any, ids: tuple[int, ...], adapter: str) -> torch.Tensor:
    model.set_adapter(adapter)
    found: torch.Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return found


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_mixed_batch_equals_peft_with_rounded_adapters(llm: LLM, rounded: Any, adapter: str) -> None:
    """Prompts are scored in one step, and answers are generated row by row beside rows of the base."""
    for score in llm.score([PROMPTS[0], PROMPTS[1]], adapter=adapter):
        logprobs = log_probabilities(rounded, score.token_ids, adapter)
        expected = [float(row[token]) for row, token in zip(logprobs, score.token_ids[1:], strict=False)]
        assert score.logprobs[1:] == pytest.approx(expected, abs=1e-4)
    names = [None, *ADAPTERS, adapter]
    for answer in llm.generate([PROMPTS[2]] * len(names), adapter=names, max_tokens=12, sampling=GREEDY):
        if answer.adapter == adapter:
            ids = answer.prompt_token_ids + answer.token_ids
            logprobs = log_probabilities(rounded, ids, adapter)[len(answer.prompt_token_ids) - 1 : -1]
            assert tuple(logprobs.argmax(-1).tolist()) == answer.token_ids


def test_an_adapter_with_magnitudes_is_refused(tmp_path: Path, llm: LLM) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(DEMO_BASE), config).save_pretrained(tmp_path)
    with pytest.raises(AdapterRejected, match="stores adapters as FP8 codes"):
        llm.add_adapter("dora", tmp_path)


def test_an_adapter_takes_fewer_pages(llm: LLM) -> None:
    with LLM(DEMO_BASE, ADAPTERS, device="cpu", dtype="float32", pool_bytes=16 << 20) as wide:
        num_pages = [sum(one.num_pages for one in engine._packed.values()) for engine in (llm, wide)]
    assert num_pages[0] < num_pages[1] / 2


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
def test_loras_of_the_embedding_and_the_head_are_read_as_codes(tmp_path: Path) -> None:
    """The weights are powers of two, which FP8 represents exactly."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, target_modules=["embed_tokens", "lm_head", "q_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32), config, "default")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
                weight.copy_(signs * 2.0 ** -torch.randint(4, 7, weight.shape, generator=generator))
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    arguments = {"device": "cpu", "dtype": "float32", "pool_bytes": 64 << 20, "adapter_dtype": "fp8"}
    with LLM(DEMO_BASE, {"outer": tmp_path}, **arguments) as opened:
        [score, base] = (opened.score(PROMPTS[0], adapter=name)[0] for name in ("outer", None))
    logprobs = log_probabilities(model.eval(), score.token_ids, "default")
    expected = [float(row[token]) for row, token in zip(logprobs, score.token_ids[1:], strict=False)]
    assert score.logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert base.logprobs[1:] != pytest.approx(expected, abs=1e-2)
