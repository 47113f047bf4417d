"""Thousands of random adapters in a blob store on disk, created once per base and reused by later runs."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.blobs.interface import canonical_key
from loramux.adapter_store.cancellation import Cancellation
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.module_places import A_SUFFIX, B_SUFFIX, TENSOR_PREFIX, module_key
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.tiers.disk_tier import DiskTier
from loramux.adapter_store.tiers.packed_source import PackedSource
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import pack_target

EFFECT = 0.5
"""Magnitude of an adapter's contribution to a linear layer's output, relative to the layer's input. It is large enough
to change most answers.
"""

SAY_EVERY = 500


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Adapters of one rank on all linear layers of a base.

    Their canonical and packed files are in the blob store, and their packed files also in the disk tier.
    """

    directory: Path
    model: ModelConfig
    rank: int
    digests: tuple[str, ...]

    @property
    def blob_url(self) -> str:
        return _blob_url(self.directory)

    @property
    def cache_dir(self) -> Path:
        return self.directory / "disk_tier"

    def packed_blobs(self, digest: str) -> list[Path]:
        """An adapter's packed files in the blob store."""
        return [*self.directory.glob(f"blobs/packed/{digest}/*")]

    def page_bytes(self, dtype: str) -> int:
        """Bytes of a page across all layers."""
        return pack_target(self.model, dtype).geometry.total_page_bytes

    def num_pages(self, dtype: str) -> int:
        """Pages of one adapter. All adapters have the same size."""
        target = pack_target(self.model, dtype)
        return target.layout(target.equal_ranks(self.rank)).num_pages

    def pack(self, digests: tuple[str, ...], dtype: str, disk_bytes: int, say: Callable[[str], None]) -> None:
        """Fetch the packed files into the disk tier, as an engine does when it first uses an adapter."""
        target = pack_target(self.model, dtype)
        disk = DiskTier(self.cache_dir, disk_bytes, target.pack_key)
        source = PackedSource(open_blob_store(self.blob_url), disk, target, BaseWeights(Path()))
        for number, digest in enumerate(digests, 1):
            source.fetch(digest, Cancellation())
            if number % SAY_EVERY == 0:
                say(f"  {number} of {len(digests)} adapters are packed")


def make_adapters(scratch: Path, base: Path, num_adapters: int, rank: int, say: Callable[[str], None]) -> AdapterFiles:
    """Create adapters with different contents until there are `num_adapters`. Adapters from earlier runs count."""
    model = ModelConfig.load(base)
    target = pack_target(model, "bfloat16")
    identity = hashlib.sha256((base / "config.json").read_bytes()).hexdigest()
    directory = scratch.absolute() / f"{identity[:12]}-rank{rank}"
    directory.mkdir(parents=True, exist_ok=True)
    listed = directory / "digests"
    digests = listed.read_text().split() if listed.exists() else []
    blobs = open_blob_store(_blob_url(directory))
    with tempfile.TemporaryDirectory(dir=directory) as folder, listed.open("a") as listing:
        canonical = Path(folder) / "canonical.safetensors"
        for number in range(len(digests), num_adapters):
            if number % SAY_EVERY == 0:
                say(f"  {number} of {num_adapters} adapters are created")
            digest = write_canonical(*_random_adapter(target, rank, number), canonical)
            blobs.put(canonical_key(digest), canonical)
            # List an adapter only after its upload, so that every listed adapter exists even if the run is interrupted.
            listing.write(digest + "\n")
            listing.flush()
            digests.append(digest)
    return AdapterFiles(directory, model, rank, tuple(digests))


def _blob_url(directory: Path) -> str:
    return f"file://{directory / 'blobs'}"


def _random_adapter(target: PackTarget, rank: int, number: int) -> tuple[bytes, dict[str, float]]:
    """The bytes of a bfloat16 safetensors file, and the scale of each module."""
    generator = torch.Generator().manual_seed(number)
    tensors: dict[str, torch.Tensor] = {}
    scales: dict[str, float] = {}
    for layer in range(target.geometry.num_layers):
        for module in target.modules:
            key = module_key(layer, module)
            A = torch.randn(rank, module.in_features, generator=generator) * module.in_features**-0.5
            B = torch.randn(module.out_features, rank, generator=generator) * (EFFECT * rank**-0.5)
            tensors[TENSOR_PREFIX + key + A_SUFFIX] = A.to(torch.bfloat16)
            tensors[TENSOR_PREFIX + key + B_SUFFIX] = B.to(torch.bfloat16)
            scales[key] = 1.0
    return save(tensors), scales
