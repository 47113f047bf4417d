"""A KV cache of int8 codes: predictions equal those of models whose K and V are rounded before they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.kv_quality import rounding_backend
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.llm import LLM, SamplingParams
from loramux.engine.loop.assembly import assemble_engine
from loramux.engine.loop.config import EngineConfig, pack_target
from loramux.engine.quantizing.quality import divergence, log_probabilities
from loramux.kernels.reference.attention import to_codes
from loramux.platform.replicas.records import base_fingerprint
from tests.conformance.demo_adapters import DEMO
from tests.demo_base import DEMO_BASE

ADAPTERS = {name: DEMO / "adapters" / name for name in ("formal", "json")}
PROMPTS = ["What is the capital of France?", "Tell me about the sea.", "Who are you?"]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def rounded(x: torch.Tensor) -> torch.Tensor:
    codes, scales = to_codes(x)
    return codes.float() * scales.float()[..., None]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO_BASE, ADAPTERS, device="cpu", dtype="float32", pool_bytes=64 << 20, kv_dtype="int8") as opened:
        yield opened


@pytest.fixture(scope="module")
def model() -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(ADAPTERS["formal"]), "formal")
    model.load_adapter(str(ADAPTERS["json"]), "json")
    return model.eval()


@torch.no_grad()
def expected(model: Any, ids: tuple[int, ...], adapter: str, *, is_rounded: bool) -> torch.Tensor:
    """The log-probabilities of peft's model, with K and V rounded in the cache of transformers or not."""
    from transformers import DynamicCache

    class RoundedCache(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(rounded(keys), rounded(values), *args, **kwargs)

    model.set_adapter(adapter)
    cache = RoundedCache() if is_rounded else DynamicCache()
    found: torch.Tensor = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0].log_softmax(-1)
    return found


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_answers_equal_those_of_peft_with_rounded_k_and_v(llm: LLM, model: Any, adapter: str) -> None:
    """Prompts are scored in one step, and answers are generated row by row beside rows of another adapter.

    Sums of other orders can move a number across the middle between two codes, so the two roundings are only nearly
    equal: they differ from each other by a small part of their difference from K and V without rounding.
    """
    differences, effects = [], []
    for score in llm.score(PROMPTS, adapter=adapter):
        with_codes, without = (expected(model, score.token_ids, adapter, is_rounded=one) for one in (True, False))
        places = torch.arange(len(score.token_ids) - 1), torch.tensor(score.token_ids[1:])
        found = torch.tensor(score.logprobs[1:])
        differences.append(found - with_codes[places])
        effects.append(without[places] - with_codes[places])
    difference, effect = (float(torch.cat(parts).square().mean().sqrt()) for parts in (differences, effects))
    assert 0 < effect < 0.05
    assert difference < effect / 4
    for answer in llm.generate([PROMPTS[2]] * 3, adapter=[adapter, "json", "formal"], max_tokens=20, sampling=GREEDY):
        if answer.adapter == adapter:
            ids = answer.prompt_token_ids + answer.token_ids
            rows = expected(model, ids, adapter, is_rounded=True)[len(answer.prompt_token_ids) - 1 : -1]
            chosen = rows[torch.arange(len(rows)), torch.tensor(answer.token_ids)]
            assert (rows.max(1).values - chosen < 0.01).all()


def test_a_cached_prefix_gives_the_same_answer(llm: LLM) -> None:
    prompt = " ".join(PROMPTS * 4)
    first, second = (llm.generate([prompt], max_tokens=12, sampling=GREEDY)[0] for _ in range(2))
    assert second.cached_tokens > 16
    assert first.token_ids == second.token_ids


def test_engines_of_other_formats_are_told_apart(llm: LLM) -> None:
    """Servers share requests only if their fingerprints are equal."""
    ready = llm._engine.ready
    assert (ready.kv_dtype, ready.quantization) == ("int8", "float, KV cache in int8")
    usual = msgspec.structs.replace(ready, quantization=None, kv_dtype="auto")
    assert base_fingerprint(ready) != base_fingerprint(usual)
    assert ready.num_kv_tokens == ready.num_pages * ready.page_tokens


def small_config(directory: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model_dir=str(directory), blob_url="", cache_dir="", dtype="float32", num_threads=1, **settings)


FAMILIES = ["llama", "gemma2", "gemma3", "gpt-oss", "gemma4", "qwen3_5"]
"""Without windows; with windows and soft caps; with windows of some layers; with sinks; with K and V of different
sizes; with states of layers without attention.
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_decoder_equals_itself_with_rounded_k_and_v(family: str, tmp_path: Path) -> None:
    from tests.conformance.tiny_models import SMALL_SHAPE, SMALL_WINDOW, make_base

    make_base(family, tmp_path, SMALL_SHAPE, SMALL_WINDOW)
    text = tuple(torch.randint(2, 300, (50,), generator=torch.Generator().manual_seed(1)).tolist())
    config = small_config(tmp_path)
    with_codes = log_probabilities(msgspec.structs.replace(config, kv_dtype="int8"), text)
    of_rounded = log_probabilities(config, text, backend=rounding_backend(rounded))
    without = log_probabilities(config, text)
    assert with_codes.isfinite().all()
    assert divergence(without, with_codes) > 0
    assert divergence(of_rounded, with_codes) < divergence(without, with_codes) / 10


def test_prefixes_of_other_formats_have_other_keys() -> None:
    roots = []
    for kv_dtype in ("auto", "int8"):
        config = small_config(DEMO_BASE, kv_dtype=kv_dtype, pool_bytes=8 << 20)
        assembled = assemble_engine(config, lambda: None, MemoryStager({}))
        roots.append(assembled.engine._prefixes.root(b"key"))
        assembled.adapters.close()
        assembled.grammars.close()
    assert roots[0] != roots[1]


def test_adapters_are_packed_for_pages_of_the_format() -> None:
    from loramux.engine.architectures.model_config import ModelConfig

    model = ModelConfig.load(DEMO_BASE)
    halves, codes = (pack_target(model, "bfloat16", None, kv_dtype) for kv_dtype in ("auto", "int8"))  # type: ignore[arg-type]
    assert halves.pack_key != codes.pack_key
    assert codes.geometry.page_bytes == halves.geometry.page_bytes // 2
