from __future__ import annotations

from dataclasses import dataclass

from loramux.adapter_store.formats.packed.packing import PackedAdapter


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter whose canonical file is in a blob store."""

    digest: str
    packed: PackedAdapter
