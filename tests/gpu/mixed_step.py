"""Two steps of one layer, for a tool that checks memory accesses: `compute-sanitizer python -m tests.gpu.mixed_step`.

Each batch mixes rows for the base with rows for adapters of several ranks, and prefills with decodes. Steps are
launched without a graph, so that the tool sees each kernel. Disable torch's memory cache, so that the tool knows where
each tensor ends.
"""

from __future__ import annotations

import sys

import torch

from tests.kernels.gpu.interpreted import DEVICE, import_kernels
from tests.kernels.layer_step import STEPS, both_sides, padded, step_of


def main() -> int:
    torch.manual_seed(0)
    (gpu_module,) = import_kernels("kernels")
    reference, gpu = both_sides(gpu_module)
    pages = torch.randperm(8, dtype=torch.int32)
    num_tokens, steps = STEPS["mixed"]
    for contexts, num_queries, slots in steps[:2]:
        step = step_of(contexts, num_queries, slots, pages, reference.weights)
        results = gpu.run(padded(step, num_tokens, num_segments=5, num_listed=24, max_q=12))
        for result, expected in zip(results, reference.run(step), strict=True):
            torch.testing.assert_close(result[: sum(num_queries)].cpu(), expected, rtol=1e-4, atol=1e-4)
    print(f"two mixed steps on {DEVICE} match the reference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
