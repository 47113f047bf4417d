"""The plan counts what a decoder of each format keeps in memory, without loading it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loramux.adapter_store.formats.quantization.mxfp4 import Mxfp4Experts
from loramux.admin.doctor import memory_plan
from loramux.admin.doctor.memory_plan import (
    GATEWAY_BYTES,
    PROCESS_BYTES,
    WORKER_BYTES,
    plan_engine,
    plan_memory,
    plan_tokens,
    plan_workers,
)
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_files import HEAD
from loramux.engine.architectures.weight_shapes import weight_shapes
from loramux.engine.decoder.weights import open_weights
from loramux.engine.device import machine_limits
from loramux.engine.loop import config as engine_config
from loramux.engine.loop.config import EngineConfig
from loramux.engine.pages.pool_size import in_gib
from loramux.engine.parallel.sharded_weights import ShardedWeights
from loramux.engine.parallel.sharding import worker_config
from loramux.engine.protocol.errors import ConfigNotUsable, ModelNotSupported
from loramux.kernels.quantized import INT4, QuantizedWeight
from tests.admin.command_line import Run
from tests.conformance.tiny_models import SMALL_SHAPE
from tests.quantized_layouts import LAYOUTS, quantize_directory

SHAPE = {**SMALL_SHAPE, "intermediate_size": 256}
HIDDEN, INNER, VOCAB = (SHAPE[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
LAYERS = SHAPE["num_hidden_layers"]
LINEARS = [(HIDDEN, HIDDEN)] * 2 + [(32, HIDDEN)] * 2 + [(INNER, HIDDEN)] * 2 + [(HIDDEN, INNER)]
NUM_WEIGHTS = LAYERS * sum(out * size for out, size in LINEARS)
NUM_OUTPUTS = LAYERS * sum(out for out, _ in LINEARS)
OUTER = 2 * (2 * VOCAB * HIDDEN + HIDDEN + 2 * LAYERS * HIDDEN)
"""The embedding, the head and the norms in bfloat16."""


HEAD_CHANGE = VOCAB * (4 - HIDDEN)
"""Bytes of an int8 head minus the bytes of a bfloat16 head: one more scale per output, and one byte less per weight."""

FORMATS = ["bfloat16", "int8", "int4", "fp8", "int8+head", "int4+head", "fp8+head"]


@pytest.fixture(autouse=True)
def _large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "free_memory", lambda: 1 << 40)


def save(directory: Path, **changes: object) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).bfloat16()
    model.save_pretrained(directory)
    return model


def weights(directory: Path, device: str = "cpu") -> dict[str, int]:
    return {plan.format: plan.weights for plan in plan_memory(directory, device)}


def test_formats_of_a_float_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "host_features", lambda: {"avx2"})
    save(tmp_path)
    planned = weights(tmp_path)
    # 5 bits per weight, and a tenth for weights that get 8 bits, rounded up for each weight.
    int4 = OUTER + 1.1 * 5 / 8 * NUM_WEIGHTS
    assert 0 <= planned.pop("int4") - int4 < 20
    assert 0 <= planned.pop("int4+head") - int4 - HEAD_CHANGE < 20
    assert planned == {
        "bfloat16": OUTER + 2 * NUM_WEIGHTS,
        "int8": OUTER + NUM_WEIGHTS + 4 * NUM_OUTPUTS,
        # No CPU kernel multiplies by FP8 codes, so they are dequantised.
        "fp8": OUTER + 2 * NUM_WEIGHTS,
        "int8+head": OUTER + NUM_WEIGHTS + 4 * NUM_OUTPUTS + HEAD_CHANGE,
        "fp8+head": OUTER + 2 * NUM_WEIGHTS + HEAD_CHANGE,
    }
    assert weights(tmp_path, "cuda")["fp8"] == weights(tmp_path)["int8"]
    monkeypatch.setattr(memory_plan, "host_features", lambda: set())
    assert set(weights(tmp_path).values()) == {OUTER + 2 * NUM_WEIGHTS}


def test_the_other_weights_of_a_float16_model_are_float32_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "host_features", lambda: {"avx2"})
    save(tmp_path).half().save_pretrained(tmp_path)
    planned = weights(tmp_path)
    assert planned["int8"] == 2 * OUTER + NUM_WEIGHTS + 4 * NUM_OUTPUTS
    assert planned["float32"] == 2 * planned["bfloat16"] == 2 * (OUTER + 2 * NUM_WEIGHTS)
    assert weights(tmp_path, "cuda")["int8"] == OUTER + NUM_WEIGHTS + 4 * NUM_OUTPUTS


def test_a_tied_head_is_laid_out_again_on_a_cpu_only(tmp_path: Path) -> None:
    save(tmp_path, tie_word_embeddings=True)
    assert weights(tmp_path)["bfloat16"] - weights(tmp_path, "cuda")["bfloat16"] == 2 * VOCAB * HIDDEN


def test_pool_and_processes_are_counted(tmp_path: Path) -> None:
    save(tmp_path)
    [plan, *_] = plan_memory(tmp_path, "cpu", pool_bytes=123 << 20, max_model_len=64)
    head_dim = HIDDEN // SHAPE["num_attention_heads"]
    assert (plan.pool, plan.process) == (123 << 20, PROCESS_BYTES + 2 * 4 * 64 * head_dim // 2)
    assert plan.total == plan.weights + plan.pool + plan.process


def test_tokens_that_fit_are_counted_with_their_scales(tmp_path: Path) -> None:
    save(tmp_path)
    head_dim = HIDDEN // SHAPE["num_attention_heads"]
    page = 16 * 2 * SHAPE["num_key_value_heads"] * LAYERS
    pages = {"auto": (1 << 20) // (page * head_dim * 2), "int8": (1 << 20) // (page * (head_dim + 2))}
    assert plan_tokens(tmp_path, "cpu", pool_bytes=1 << 20) == {name: 16 * count for name, count in pages.items()}


@pytest.mark.parametrize(
    ("layout", "device", "per_weight"),
    [
        ("awq", "cpu", 0.5 + (2 + 4) / 32),
        ("ct-w4a16", "cpu", 0.5 + 2 / 64),
        ("nf4-double", "cpu", 0.5 + 4 / 64),
        ("gptq-int8", "cpu", 1 + 2 / 32),
        ("gptq-act-order", "cpu", 0.5 + (2 + 4) / 32),
        # No CPU kernel multiplies by FP8 codes, so they are dequantised.
        ("fp8-blocks", "cpu", 2),
        ("ct-w8a16-asymmetric", "cuda", 1 + (2 + 2) / 64),
        ("awq", "cuda", 0.5 + (2 + 2) / 32),
        ("ct-mxfp4", "cuda", 0.5 + 2 / 32),
    ],
)
def test_a_checkpoint_that_is_quantised_has_its_own_format(
    tmp_path: Path, layout: str, device: str, per_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "host_features", lambda: {"avx2"})
    torch.manual_seed(0)
    quantize_directory(save(tmp_path), tmp_path, LAYOUTS[layout])
    planned = weights(tmp_path, device)
    [own] = planned.keys() - {"bfloat16"}
    assert planned[own] == OUTER + math.floor(per_weight * NUM_WEIGHTS)


def test_a_format_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    save(tmp_path, intermediate_size=104)
    problems = {plan.format: plan.problem for plan in plan_memory(tmp_path, "cpu") if plan.problem}
    assert list(problems) == ["int4", "int4+head"]
    assert "use --quantization int8" in str(problems["int4"])


def test_command(loramux: Run, tmp_path: Path) -> None:
    save(tmp_path, intermediate_size=104)
    text = loramux("doctor", "--plan", str(tmp_path))
    assert text.exit_code == 0
    *formats, room = text.stdout.splitlines()[1:]
    assert [line.split()[0] for line in formats] == ["format", *FORMATS]
    tokens = plan_tokens(tmp_path, "cpu")
    assert room.endswith(f": {tokens['auto']:,} with --kv-dtype auto, {tokens['int8']:,} with --kv-dtype int8")
    document = json.loads(loramux("doctor", "--plan", str(tmp_path), "--json").stdout)
    assert document["pool_tokens"] == tokens
    assert [row["format"] for row in document["data"]] == FORMATS
    first = document["data"][0]
    assert first["total_bytes"] == first["weights_bytes"] + first["pool_bytes"] + first["process_bytes"]


def test_host_memory_for_evicted_prefixes_is_part_of_the_total(loramux: Run, tmp_path: Path) -> None:
    save(tmp_path)
    arguments = ("doctor", "--plan", str(tmp_path), "--kv-host-bytes", "3GiB")
    header, first = loramux(*arguments).stdout.splitlines()[1:3]
    assert [name.strip() for name in header.split("  ") if name][-3:] == ["host K/V", "process", "total"]
    assert "3.0 GiB" in first
    [found, *_] = json.loads(loramux(*arguments, "--json").stdout)["data"]
    [without, *_] = plan_memory(tmp_path, "cpu")
    assert (found["kv_host_bytes"], found["total_bytes"]) == (3 << 30, without.total + (3 << 30))
    assert loramux("doctor", "--plan", str(tmp_path), "--kv-host-bytes", "much").exit_code == 2


def test_a_sum_that_does_not_fit_into_the_machine_is_named(
    loramux: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    [plan, *_] = plan_memory(tmp_path, "cpu")
    sizes = ("--data-parallel-size", "2", "--kv-host-bytes", "3GiB", "--pool-bytes", "2GiB")
    # Two pools, host tiers of K and V, and host tiers of adapters, and the processes.
    needed = plan.total_of(2) + 2 * (1 << 30) + 2 * (3 << 30) + 2 * (1 << 30)

    def planned(device: str, available: int) -> str:
        monkeypatch.setattr(machine_limits, "free_memory", lambda: available)
        monkeypatch.setattr(engine_config, "missing_for_cuda", lambda gpus: None if device == "cuda" else "no driver")
        return str(loramux("doctor", "--plan", str(tmp_path), "--device", device, *sizes).stdout)

    assert "too little" not in planned("cpu", needed)
    said = "too little main memory: this machine has {} available, and with a host tier of 1.0 GiB in each engine, the"
    named = f"sum is {in_gib(needed)} for bfloat16, {in_gib(needed)} for int8"
    assert f"{said.format(in_gib(needed - 1))} sum is {in_gib(needed)} for bfloat16" in planned("cpu", needed - 1)
    assert f"{said.format('1.0 GiB')} {named}" in planned("cpu", 1 << 30)
    document = json.loads(loramux("doctor", "--plan", str(tmp_path), "--device", "cpu", *sizes, "--json").stdout)
    assert (document["available_bytes"], document["data"][0]["main_memory_bytes"]) == (1 << 30, needed)
    # On GPUs, weights and pools are not in main memory.
    assert "too little" not in planned("cuda", 8 << 30)
    assert "the sum is 8.0 GiB for bfloat16, 8.0 GiB for int8" in planned("cuda", (8 << 30) - 1)
    # This machine's memory says nothing about a machine with another device.
    elsewhere = ("doctor", "--plan", str(tmp_path), "--device", "cpu", *sizes)
    assert "too little" not in loramux(*elsewhere).stdout
    assert json.loads(loramux(*elsewhere, "--json").stdout)["available_bytes"] is None


def test_refused_models_are_refused_here_too(loramux: Run, tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match=r"no config\.json"):
        plan_memory(tmp_path, "cpu")
    result = loramux("doctor", "--plan", str(tmp_path), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["code"] == "model_not_supported"
    save(tmp_path)
    result = loramux("doctor", "--plan", str(tmp_path), "--tensor-parallel-size", "3", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["code"] == "wrong_settings"


def test_engines_have_weights_and_a_pool_each(loramux: Run, tmp_path: Path) -> None:
    save(tmp_path)
    [plan, *_] = plan_memory(tmp_path, "cpu")
    each = plan.weights + plan.pool + plan.process - GATEWAY_BYTES
    assert (plan.total_of(1), plan.total_of(3)) == (plan.total, plan.total + 2 * each)
    text = loramux("doctor", "--plan", str(tmp_path), "--data-parallel-size", "2").stdout.splitlines()
    assert text[1] == "each of the 2 engines has the weights and a pool; the total is that of all engines"
    document = json.loads(loramux("doctor", "--plan", str(tmp_path), "--data-parallel-size", "2", "--json").stdout)
    assert (document["num_engines"], document["data"][0]["total_bytes"]) == (2, plan.total_of(2))
    assert loramux("doctor", "--plan", str(tmp_path), "--data-parallel-size", "0").exit_code == 2
    assert loramux("doctor", "--data-parallel-size", "2").exit_code == 2


@pytest.mark.parametrize(
    ("dtype", "method", "name"),
    [
        ("bfloat16", None, "bfloat16"),
        ("bfloat16", "int8", "int8"),
        ("float32", None, "float32"),
        ("float32", "int8", "int8"),
    ],
)
def test_an_engines_own_format_is_planned(tmp_path: Path, dtype: str, method: str | None, name: str) -> None:
    save(tmp_path)
    config = EngineConfig(model_dir=str(tmp_path), blob_url="", cache_dir="", dtype=dtype, pool_bytes=5 << 20)
    plan = plan_engine(config, method)
    assert (plan.format, plan.pool) == (name, 5 << 20)
    sizes = weights(tmp_path)
    others = OUTER if (dtype, method) == ("float32", "int8") else 0
    assert plan.weights == sizes.get(name, 2 * sizes["bfloat16"]) + others


def test_experts_are_planned_with_the_widest_scales() -> None:
    """A scale of 2**-127 needs 32 bits on a CPU."""
    codes, scales = np.zeros((64, 16), np.uint8), np.ones((2, 64, 1), np.float32)
    first, second = (QuantizedWeight(codes=codes, codebook=INT4, scales=own) for own in scales)
    assert memory_plan._kept_bytes(Mxfp4Experts((first, second)), "cpu") == 2 * 64 * (16 + 2)
    scales[1, 5] = 2.0**-127
    assert memory_plan._kept_bytes(Mxfp4Experts((first, second)), "cpu") == 2 * 64 * (16 + 4)


def worker_bytes(directory: Path, num_workers: int) -> int:
    """Bytes of the tensors that worker 0 reads."""
    model = ModelConfig.load(directory)
    shapes = {**weight_shapes(worker_config(model, num_workers)), HEAD: (-(-VOCAB // num_workers), HIDDEN)}
    with open_weights(directory) as weights:
        sharded = ShardedWeights(weights, model, num_workers, 0)
        tensors = [sharded.tensor(name, shape) for name, shape in shapes.items()]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_worker_has_what_it_reads(tmp_path: Path, num_workers: int, is_tied: bool) -> None:
    save(tmp_path, tie_word_embeddings=is_tied)
    [plan, *_] = plan_memory(tmp_path, "cpu", 8 << 20, num_workers=num_workers)
    [alone, *_] = plan_memory(tmp_path, "cpu", 8 << 20)
    assert plan.weights == worker_bytes(tmp_path, num_workers)
    rotary = alone.process - PROCESS_BYTES
    assert plan.process == alone.process + (num_workers - 1) * (WORKER_BYTES + rotary)
    assert plan.total == num_workers * plan.weights + plan.pool + plan.process
    assert plan.worker == plan.weights + (8 << 20) // num_workers
    # Every worker has the whole embedding, so all of them together have more than one.
    assert plan.all_weights > alone.weights + (num_workers - 2) * 2 * VOCAB * HIDDEN


def test_scales_of_summed_outputs_are_in_every_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "host_features", lambda: {"avx2"})
    save(tmp_path, num_key_value_heads=2)
    planned = {plan.format: plan.weights for plan in plan_memory(tmp_path, "cpu", num_workers=2)}
    divided = LAYERS * (HIDDEN + 2 * INNER + 2 * 64) // 2
    summed = LAYERS * 2 * HIDDEN
    num_weights = LAYERS * (2 * HIDDEN * HIDDEN + 2 * 64 * HIDDEN + 3 * INNER * HIDDEN) // 2
    head_and_rest = OUTER - VOCAB * HIDDEN
    assert planned["int8"] == head_and_rest + num_weights + 4 * (divided + summed)


@pytest.mark.parametrize(("layout", "per_weight"), [("ct-w4a16-asymmetric", 0.5 + (2 + 4) / 32), ("nf4", 0.5 + 4 / 64)])
def test_a_worker_has_its_part_of_the_codes(
    tmp_path: Path, layout: str, per_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "host_features", lambda: {"avx2"})
    torch.manual_seed(0)
    quantize_directory(save(tmp_path, num_key_value_heads=2), tmp_path, LAYOUTS[layout])
    planned = {plan.format: plan.weights for plan in plan_memory(tmp_path, "cpu", num_workers=2)}
    [own] = planned.keys() - {"bfloat16"}
    num_weights = LAYERS * (2 * HIDDEN * HIDDEN + 2 * 64 * HIDDEN + 3 * INNER * HIDDEN) // 2
    assert planned[own] == OUTER - VOCAB * HIDDEN + math.floor(per_weight * num_weights)


def test_groups_that_workers_cannot_divide_are_a_problem(tmp_path: Path) -> None:
    save(tmp_path, intermediate_size=96)
    problems = {plan.format: plan.problem for plan in plan_memory(tmp_path, "cpu", num_workers=4) if plan.problem}
    assert list(problems) == ["int4", "int4+head"]
    said = "tensor_parallel_size 4 cannot divide the groups of 32 inputs of model.layers.0.mlp.down_proj"
    assert said in str(problems["int4"])
    quantized = tmp_path / "quantized"
    quantize_directory(save(quantized), quantized, LAYOUTS["ct-w4a16"])
    with pytest.raises(ConfigNotUsable, match=r"^4 workers cannot divide .*o_proj.*: inputs 0 to 32 are not whole"):
        plan_memory(quantized, "cpu", num_workers=4)


def test_workers_divide_the_pool(tmp_path: Path) -> None:
    save(tmp_path, num_key_value_heads=2)
    alone = plan_tokens(tmp_path, "cpu", pool_bytes=1 << 20)
    assert plan_tokens(tmp_path, "cpu", pool_bytes=1 << 20, num_workers=2) == alone
    # Four workers have two heads twice.
    assert plan_tokens(tmp_path, "cpu", pool_bytes=2 << 20, num_workers=4) == alone


def test_exchanges_of_workers_are_planned(loramux: Run, tmp_path: Path) -> None:
    save(tmp_path, vocab_size=321)
    plan = plan_workers(tmp_path, "cpu", 2)
    assert (plan.num_sums, plan.sum_bytes) == (2 * LAYERS, 4 * HIDDEN)
    # The last of 322 columns stands for no token.
    assert (plan.join_bytes, plan.embedding_bytes) == (4 * 322, 2 * 321 * HIDDEN)
    assert plan.whole_adapter_bytes // 2 < plan.adapter_bytes <= plan.whole_adapter_bytes
    on_gpu = plan_workers(tmp_path, "cuda", 2)
    assert (on_gpu.sum_bytes, on_gpu.join_bytes) == (2 * HIDDEN, 2 * 322)
    options = ("--tensor-parallel-size", "2", "--device", "cuda", "--pool-bytes", "64MiB")
    text = loramux("doctor", "--plan", str(tmp_path), *options)
    assert f"adds up outputs {2 * LAYERS} times, 0.2 KiB for each sequence" in text.stdout
    assert text.stdout.endswith("tensor parallelism has not been run on GPUs yet, so this plan is only computed\n")
    document = json.loads(loramux("doctor", "--plan", str(tmp_path), *options, "--json").stdout)
    assert (document["num_workers"], document["workers"]["num_sums"]) == (2, 2 * LAYERS)
    [first, *_] = document["data"]
    assert first["worker_bytes"] == first["weights_bytes"] + (32 << 20)
    refused = loramux("doctor", "--plan", str(tmp_path), "--tensor-parallel-size", "3")
    assert (refused.exit_code, "does not divide the model's 4 attention heads" in refused.stderr) == (1, True)
    assert loramux("doctor", "--plan", str(tmp_path), "--device", "tpu").exit_code == 2
