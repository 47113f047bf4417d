"""The Triton LoRA kernels of vLLM and SGLang, loaded from copies of their files without installing either package.

`--peers` names a folder that contains these folders from their wheels: `vllm/lora/ops/triton_ops/` and
`sglang/kernels/ops/lora/dense/`, and the `*.dist-info` folders, which name the versions. The files of both packages
import a few names from elsewhere in their package. Stubs replace those names here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.gpu.adapters import SCALE, LoraBatch, ResidentAdapters
from benchmarks.gpu.ways import LayerLaunch, MakeLaunch, joined_a, power_of_two_above, stacked
from loramux.kernels.layout import B
from loramux.kernels.segments import build_segments

VLLM_FILES = "vllm/lora/ops/triton_ops"
SGLANG_FILES = "sglang/kernels/ops/lora/dense"
VLLM, SGLANG, SGLANG_SPLIT = "vllm", "sglang csgmv", "sglang csgmv split-K 8"
WAYS = (VLLM, SGLANG, SGLANG_SPLIT)
"""The methods to compare with when the files of all peers are present."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One method of a peer. `make` lays out the adapters for the peer's kernels and returns the launch."""

    name: str
    version: str
    make: MakeLaunch


def load_peers(folder: Path, device: torch.device) -> tuple[list[Peer], dict[str, str]]:
    """The methods of the peers that can be loaded, and the reason for each peer that cannot be loaded."""
    peers, problems = [], {}
    for name, load in (("vllm", _load_vllm), ("sglang", _load_sglang)):
        try:
            peers += load(folder.resolve(), device)
        # Report any error in third-party code, and continue without that peer.
        except Exception as error:
            problems[name] = f"{type(error).__name__}: {error}"
    return peers, problems


def _stub(name: str, **names: Any) -> ModuleType:
    """Register a stub module that contains only these names. It is a package, so that it can have submodules."""
    module = ModuleType(name)
    module.__path__ = []
    module.__dict__.update(names)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _packages(folder: Path, name: str) -> None:
    """Stub the package `name` and its parents, so that no `__init__` runs. Only `name` finds files in `folder`."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        _stub(".".join(parts[:count]))
    sys.modules[name].__path__ = [str(folder / Path(*parts))]
    if not (folder / Path(*parts)).is_dir():
        raise FileNotFoundError(f"{folder / Path(*parts)} does not exist")


def _version(folder: Path, name: str) -> str:
    found = sorted(folder.glob(f"{name}*.dist-info"))
    return found[0].name.removesuffix(".dist-info") if found else "unknown"


class _Quiet:
    """A logger that accepts calls to any method and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **names: None


def _load_vllm(folder: Path, device: torch.device) -> list[Peer]:
    _packages(folder, VLLM_FILES.replace("/", "."))

    class Platform:
        def is_cuda(self) -> bool:
            return device.type == "cuda"

        def has_device_capability(self, capability: int) -> bool:
            major, minor = torch.cuda.get_device_capability(device) if self.is_cuda() else (0, 0)
            return major * 10 + minor >= capability

    _stub(
        "vllm.envs",
        VLLM_BATCH_INVARIANT=False,
        VLLM_TUNED_CONFIG_FOLDER=None,
        VLLM_LORA_DISABLE_PDL=False,
        VLLM_LORA_ENABLE_DUAL_STREAM=False,
    )
    _stub("vllm.logger", init_logger=lambda name: _Quiet())
    _stub("vllm.platforms", current_platform=Platform())
    _stub("vllm.triton_utils", tl=tl, triton=triton)
    _stub("vllm.utils")
    _stub("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2)

    def register(**names: Any) -> None:
        # Without custom operators, vLLM's files fall back to plain functions.
        raise AttributeError("no custom operators here")

    def to_device(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    _stub("vllm.utils.torch_utils", direct_register_custom_op=register, async_tensor_h2d=to_device)
    package = VLLM_FILES.replace("/", ".")
    shrink = importlib.import_module(f"{package}.lora_shrink_op").lora_shrink
    expand = importlib.import_module(f"{package}.lora_expand_op").lora_expand
    metadata = importlib.import_module(f"{package}.lora_kernel_metadata").LoRAKernelMeta
    pointers = importlib.import_module(f"{package}.utils")

    def make(adapters: ResidentAdapters, batch: LoraBatch, num_stored: int) -> LayerLaunch:
        # vLLM caches weights by address. Addresses are reused for other shapes, so clear its caches.
        pointers._LORA_A_PTR_DICT.clear()
        pointers._LORA_B_PTR_DICT.clear()
        model, case, device = adapters.model, batch.case, batch.xs[0].device
        stored = [
            [([stacked(adapters, layer, module, 0) for module in group.modules],
              [stacked(adapters, layer, module, B) for module in group.modules]) for group in model.groups]
            for layer in range(num_stored)
        ]  # fmt: skip
        buffers = [
            torch.full((len(group.modules), case.num_rows, adapters.max_rank), torch.nan, device=device)
            for group in model.groups
        ]
        meta = metadata.make(len(adapters.ranks), case.num_rows, device)
        meta.prepare_tensors(torch.from_numpy(case.slots).to(device).clamp(max=len(adapters.ranks) - 1))
        # Size the grid by the number of active adapters, which is vLLM's best setting. The default is the maximum
        # number.
        arguments = meta.meta_args(case.num_rows, True)

        def launch(layer: int, ys: list[torch.Tensor]) -> None:
            for x, (a, b), buffer, y in zip(batch.xs, stored[layer % num_stored], buffers, ys, strict=True):
                shrink(x, a, buffer, *arguments, SCALE)
                expand(buffer, b, y, *arguments, add_inputs=True)

        return launch

    return [Peer(VLLM, _version(folder, "vllm"), make)]


def _load_sglang(folder: Path, device: torch.device) -> list[Peer]:
    package = SGLANG_FILES.replace("/", ".")
    _packages(folder, package)
    off = SimpleNamespace(get=lambda: False)
    for name in ("sglang.srt", "sglang.srt.lora"):
        _stub(name)
    _stub(
        "sglang.srt.environ",
        envs=SimpleNamespace(SGLANG_ENABLE_LORA_CSGMV_SPLIT_K=off, SGLANG_ENABLE_DETERMINISTIC_INFERENCE=off),
    )
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    # SGLang's cache of compiled kernels saves only host time, which does not matter in a replayed graph.
    _stub(
        "sglang.srt.utils", cached_triton_kernel=lambda key: lambda kernel: kernel, get_device_name=lambda: device_name
    )
    _stub("sglang.srt.lora.utils", LoRABatchInfo=SimpleNamespace)
    shrink = importlib.import_module(f"{package}.chunked_sgmv_shrink").chunked_sgmv_lora_shrink_forward
    expand = importlib.import_module(f"{package}.chunked_sgmv_expand").chunked_sgmv_lora_expand_forward

    def make_with(split_k: int | None) -> MakeLaunch:
        def make(adapters: ResidentAdapters, batch: LoraBatch, num_stored: int) -> LayerLaunch:
            model, case, device = adapters.model, batch.case, batch.xs[0].device
            stored = [
                [(joined_a(adapters, layer, group, is_packed=True),
                  torch.cat([stacked(adapters, layer, module, B) for module in group.modules], 1))
                 for group in model.groups]
                for layer in range(num_stored)
            ]  # fmt: skip
            # Each chunk covers an adapter's run of rows, within SGLang's limits. This gives the fewest chunks and
            # wastes no rows.
            chunk = min(128, max(16, power_of_two_above(case.rows_each)))
            listed = build_segments(case.slots.clip(max=len(adapters.ranks) - 1), chunk)
            info = SimpleNamespace(
                use_cuda_graph=True,
                max_len=chunk,
                num_segments=listed.num_segments,
                seg_indptr=listed.starts.to(device),
                weight_indices=listed.slots.to(device),
                lora_ranks=torch.tensor(adapters.ranks, dtype=torch.int32, device=device),
                scalings=torch.full((len(adapters.ranks),), SCALE, device=device),
                permutation=listed.rows.to(device),
            )
            offsets = [torch.tensor([*group.out_offsets, group.total_out], dtype=torch.int32) for group in model.groups]
            on_device = [one.to(device) for one in offsets]

            def launch(layer: int, ys: list[torch.Tensor]) -> None:
                for g, group in enumerate(model.groups):
                    a, b = stored[layer % num_stored][g]
                    v = shrink(batch.xs[g], a, info, len(group.modules), split_k)
                    expand(v, b, info, on_device[g], max(group.out_features), ys[g], offsets[g])

            return launch

        return make

    version = _version(folder, "sglang")
    # SGLang's default, and its option for few rows: the sum over A's columns is split among eight programs.
    return [
        Peer(SGLANG, version, make_with(None)),
        Peer(SGLANG_SPLIT, version, make_with(8)),
    ]
