"""Reads packed adapters from paths."""

from __future__ import annotations

import os
from pathlib import Path

from loramux.adapter_store.formats.files.checksums import PayloadCheck
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packed_file import plain_memory, read_open_packed
from loramux.adapter_store.formats.packed.packing import PackedAdapter


def read_packed(path: Path, target: PackTarget | None = None, digest: str | None = None) -> PackedAdapter:
    """Read a packed adapter, verifying every byte. Raises AdapterCorrupt."""
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        return read_open_packed(descriptor, os.fstat(descriptor), PayloadCheck(), target, digest, plain_memory)
