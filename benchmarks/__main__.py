"""The table of benchmarks: `python -m benchmarks` lists them, and `python -m benchmarks NAME [ARGUMENTS]` runs one."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The module to run, what it measures, its usual duration if known, and arguments that come before the user's."""

    module: str
    summary: str
    duration: str = ""
    arguments: tuple[str, ...] = ()


BENCHMARKS = {
    "mixed-batch": Benchmark("mixed_batch", "Sixteen adapters in one batch, compared with peft"),
    "peers": Benchmark("peers", "loramux, peft, vLLM and llama-server on the same requests"),
    "streams": Benchmark("peers.streams", "Decode speed of 1, 4 and 16 streams, compared with llama.cpp in process"),
    "gateway": Benchmark("gateway", "The gateway in front of a scripted engine, compared with LiteLLM"),
    "serving": Benchmark("serving", "A whole server over HTTP under load, compared with its engine alone", "6 minutes"),
    "batches": Benchmark(
        "serving.batches", "A polite tenant beside a full batch, and the throughput of a batch", "10 minutes"
    ),
    "push": Benchmark(
        "serving.push", "Time from a trainer's push to the first token of the new version, beside streams", "3 hours"
    ),
    "structured-output": Benchmark("structured_output", "Throughput and first tokens with schemas, compared with vLLM"),
    "s-lora": Benchmark("s_lora", "Throughput over 5 to 2,000 adapters on disk", "9 minutes"),
    "flood": Benchmark("tenants.flood", "Latency of polite tenants while one floods the server"),
    "cold-storm": Benchmark("tenants.cold_storm", "Latency of running streams while 200 new adapters load"),
    "hot-load": Benchmark("hot_load", "Loading adapters from the disk tier, compared with plain reads"),
    "trained-rows": Benchmark("trained_rows", "Memory and time of a trained head, compared with the base's own"),
    "sharing": Benchmark("sharing.round_robin", "Three servers that share requests, compared with round robin"),
    "cluster": Benchmark("cluster", "Engines in a Ray cluster, compared with servers of their own", "9 minutes"),
    "broadcasts": Benchmark("cluster.broadcasts", "Bytes that a Ray cluster of 50 replicas sends to its gateways"),
    "forwarding": Benchmark("sharing.forwarding", "Time that running a request on another server adds", "2 minutes"),
    "quantized": Benchmark("quantized", "Products and decode steps with 8 and 4 bits, compared with bfloat16"),
    "quantization-quality": Benchmark(
        "quantization_quality", "How much each format of weights changes the predictions of real models"
    ),
    "adapter-quality": Benchmark("adapter_quality", "How much adapters in FP8 change the predictions of a model"),
    "kv-attention": Benchmark("kv_attention", "Decode attention on a CPU with a KV cache in 8 bits, compared with 16"),
    "kv-quality": Benchmark("kv_quality", "How much a KV cache in 8 bits changes the predictions of a model"),
    "memory": Benchmark("memory", "Memory of a server with 16, 8 and 4 bits, compared with its plan"),
    "speculation": Benchmark("speculation", "Decoding with drafts, compared with decoding without"),
    "drafter": Benchmark("drafter", "How often drafts are right with drafters of adapters, and without"),
    "conversations": Benchmark(
        "conversations",
        "Conversations that do not fit into the pool, with host memory for K and V and without",
        "4 minutes",
    ),
    "shared-context": Benchmark(
        "shared_context", "Eight adapters over one long context, with a prefix of their own and with the base's"
    ),
    "shared-quality": Benchmark(
        "shared_quality", "How much reading prompts with the base's K and V changes the predictions of adapters"
    ),
    "versions": Benchmark("versions", "Decode steps, compared with those of another checkout (CHECKOUT)"),
    "simulation": Benchmark("simulation", "Engine steps per second on a simulated device"),
    "routing": Benchmark("routing", "The choice of replicas in a simulated fleet, by policy", "7 minutes"),
    "disaggregation": Benchmark(
        "routing.disaggregation", "Prefill and decode on separate GPUs, simulated", "4 minutes"
    ),
    "admission": Benchmark("accounts.admission", "Reserving and settling quota, on both databases"),
    "first-token": Benchmark("accounts.first_token", "Time to first token with and without quotas"),
    "registry": Benchmark("accounts.registry", "Resolving a name among 100,000 versions, on both databases"),
    "admin-lists": Benchmark("accounts.admin_lists", "Lists of the admin API over 100,000 versions, on both databases"),
    "usage-report": Benchmark("accounts.usage_report", "Usage reports over 10 million requests, on both databases"),
    "console-pages": Benchmark("accounts.console_pages", "Console pages over 10 million requests, on both databases"),
    "gpu": Benchmark("gpu", "Kernels and engine on a GPU", "9 minutes"),
    "gpu-trace": Benchmark("gpu.kernel_times", "Times of each kernel of whole steps on a GPU", "1 minute"),
    "gpu-table": Benchmark("gpu.table", "Launches and bytes of each step on a GPU, counted without one", "1 minute"),
    "gpu-dry": Benchmark("gpu", "Memory and time of each case of gpu, without a GPU", "5 seconds", ("--dry-run",)),
}


def main(argv: Sequence[str]) -> int:
    name, *arguments = argv or [""]
    if name not in BENCHMARKS:
        if name:
            print(f"there is no benchmark {name}; the benchmarks are:", file=sys.stderr)
        print("\n".join(listing()))
        return 2 if name else 0
    chosen = BENCHMARKS[name]
    sys.argv = [f"python -m benchmarks {name}", *chosen.arguments, *arguments]
    runpy.run_module(f"benchmarks.{chosen.module}", run_name="__main__", alter_sys=True)
    return 0


def listing() -> list[str]:
    """One line per benchmark: its name, what it measures, and its usual duration."""
    width = max(map(len, BENCHMARKS))
    return [
        f"{name:{width}}  {one.summary}" + (f" ({one.duration})" if one.duration else "")
        for name, one in BENCHMARKS.items()
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
