from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

KERNEL_FILES = (
    *(
        f"gpu/test_{name}.py"
        for name in (
            "attention", "fused", "lora", "lora_linear", "sampling", "layer_step", "adapter_pairs", "coded_products",
            "scaled_products", "contiguous_attention",
        )
    ),
    *(
        f"test_{name}.py"
        for name in (
            "attention", "fused", "lora", "outer", "delta", "experts", "coded_experts", "expert_adapters", "routing",
            "trained_rows", "int8_kv", "affines",
        )
    ),
)  # fmt: skip
ENGINE_FILES = (
    "engine/execution/test_device_sampler.py",
    "engine/execution/test_sampling_extremes.py",
    "engine/constraints/test_logit_penalties.py",
    "conformance/test_gpu_engine.py",
    "conformance/test_added_tokens.py",
    "conformance/test_prompt_logprobs.py",
    "conformance/test_token_rules.py",
    # The other tests of these files do not use a GPU.
    "conformance/test_activated.py::test_a_mixed_batch_on_the_gpu_path_equals_peft",
    "conformance/test_expert_adapters.py::test_the_gpu_path_equals_the_references",
    "conformance/test_quantized_bases.py::test_a_gpu_keeps_the_codes_of_every_layout",
    "conformance/test_quantized_experts.py::test_experts_are_served_from_their_codes",
    "conformance/test_trained_rows.py::test_the_gpu_path_equals_peft",
)
WORKER_FILES = ("engine/parallel/test_process_groups.py", "conformance/test_tensor_parallel_gpus.py")
REGISTRATION_FILES = ("engine/device/test_cuda.py",)

SANITIZER = "compute-sanitizer"
TOOLKIT = "/usr/local/cuda/bin"


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of a stage. `select` and `marks` are the `-k` and `-m` of pytest, and only this stage uses `scratch`."""

    is_interpreted: bool
    num_processes: int
    select: str
    marks: str
    scratch: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """A stage's processes, which run in parallel. `note` adds a remark to the result."""

    commands: list[list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the run. It is stopped after `limit_s`, or later if only a few stages were selected."""

    name: str
    limit_s: float
    plan: Callable[[Setting], Plan]


def module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def shares(setting: Setting, files: tuple[str, ...], select: str = "", num_processes: int = 1) -> Plan:
    """Split the tests of these files among processes, each with its own report in the scratch directory."""
    chosen = " and ".join(f"({one})" for one in (select, setting.select) if one)
    options = ["-v", "-rfE", "--tb=short", "-p", "tests.gpu.shards", "-m", setting.marks]
    options += ["-k", chosen] if chosen else []
    paths = [f"tests/{file}" for file in files]
    return Plan(
        [
            module(
                "pytest",
                *options,
                f"--shard={shard}/{num_processes}",
                f"--junitxml={setting.scratch / f'{shard}.xml'}",
                *paths,
            )
            for shard in range(num_processes)
        ],
        # The reference kernels run on the CPU.
        {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_processes))},
    )


def versions(setting: Setting) -> Plan:
    return Plan([module("tests.gpu.versions")])


def kernels(setting: Setting) -> Plan:
    files = tuple(f"kernels/{file}" for file in KERNEL_FILES)
    # Select only the tests that run on a GPU.
    return shares(setting, files, "gpu or triton", setting.num_processes)


def engine(setting: Setting) -> Plan:
    return shares(setting, ENGINE_FILES, num_processes=setting.num_processes)


def workers(setting: Setting) -> Plan:
    return shares(setting, WORKER_FILES)


def registration(setting: Setting) -> Plan:
    return shares(setting, REGISTRATION_FILES)


def sanitized(tool: str, environment: dict[str, str]) -> Callable[[Setting], Plan]:
    """Run the mixed step under one of the sanitizer's tools. Without a sanitizer, run the step alone."""

    def plan(setting: Setting) -> Plan:
        step = module("tests.gpu.mixed_step")
        sanitizer = shutil.which(SANITIZER) or shutil.which(SANITIZER, path=TOOLKIT)
        if sanitizer is None:
            return Plan([step], note=f"{SANITIZER} is not installed, so the step ran without it")
        return Plan([[sanitizer, "--tool", tool, "--error-exitcode", "9", *step]], environment)

    return plan


def benchmark(setting: Setting) -> Plan:
    small = ["--interpret"] if setting.is_interpreted else []
    return Plan([module("tests.gpu.benchmark_checks", *small, "--out", str(setting.scratch / "benchmark.json"))])


STAGES = (
    Stage("versions", 40, versions),
    Stage("kernels", 200, kernels),
    Stage("engine", 120, engine),
    Stage("workers", 60, workers),
    Stage("registration", 40, registration),
    # Without the cache, each tensor has its own allocation, so the tool knows where the tensor ends.
    Stage("memcheck", 60, sanitized("memcheck", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})),
    Stage("racecheck", 60, sanitized("racecheck", {})),
    Stage("benchmark", 180, benchmark),
)
