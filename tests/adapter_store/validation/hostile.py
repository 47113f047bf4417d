"""The entry type of the catalogue of hostile uploads, and the valid adapter that entries corrupt.

All text that a tenant could choose contains MARK, so that tests detect messages that repeat it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from tests.adapter_store.adapter_files import AdapterFiles, AdapterMaker
from tests.adapter_store.small_base import OUTER_MODULES, make_target

MARK = "kilroy"
TARGET = make_target(outer_modules=OUTER_MODULES)
"""The small base with its embedding and head."""

LAYER = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
Q_A, Q_B = LAYER.format(0, "A"), LAYER.format(0, "B")
CONFIG, TENSORS = CONFIG_FILE, TENSORS_FILE

Change = Callable[[AdapterFiles], object]
Place = Callable[[Path, bytes], None]


def good_files(target: PackTarget = TARGET, **adapter: Any) -> AdapterFiles:
    return AdapterMaker(target)(**adapter)


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """`change` corrupts a valid adapter. If `config` or `tensors` is set, it replaces a whole file. If `place` is set,
    it creates the tensors file.
    """

    name: str
    code: str
    param: str | None
    change: Change = field(default=lambda files: None)
    config: bytes | None = None
    tensors: bytes | Callable[[], bytes] | None = None
    place: Place | None = None
    is_tied: bool = False
    """True if the base ties its head to its embedding."""
    adapter: dict[str, Any] = field(default_factory=dict)
    base: PackTarget = TARGET

    @property
    def target(self) -> PackTarget:
        return replace(self.base, tied_embeddings=self.is_tied)

    def files(self) -> tuple[bytes, bytes]:
        files = good_files(self.base, **self.adapter)
        self.change(files)
        config = files.config_bytes if self.config is None else self.config
        if self.tensors is None:
            return config, files.tensor_bytes
        return config, self.tensors if isinstance(self.tensors, bytes) else self.tensors()

    def write(self, directory: Path) -> tuple[Path, Path]:
        config, tensors = self.files()
        places = directory / CONFIG_FILE, directory / TENSORS_FILE
        places[0].write_bytes(config)
        if self.place is None:
            places[1].write_bytes(tensors)
        else:
            self.place(places[1], tensors)
        return places


def header_file(header: object, data: bytes = b"") -> bytes:
    """`header` is either a JSON document or raw bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int, shape: Any = (4, 32), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def good_header() -> tuple[dict[str, Any], bytes]:
    """The header and data of a valid adapter, to be corrupted."""
    tensors = good_files().tensor_bytes
    (length,) = struct.unpack_from("<Q", tensors)
    return json.loads(tensors[8 : 8 + length]), tensors[8 + length :]
