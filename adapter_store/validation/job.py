"""Messages between the server and the validation process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.version_files.adapter_task import AdapterTask

_OWN_MEMORY_BYTES = 512 << 20
"""Address space for Python, numpy and the work on one tensor, in bytes; 142 MB is used before the first tensor."""

_OWN_FILE_BYTES = 16 << 20
MIN_TIME_S = 10.0
BYTES_PER_S = 20 << 20
"""The time limit allows one second for this many bytes, read or written, but is never below `MIN_TIME_S`.

An idle core processes more than six times as many bytes per second. For example, on an AMD EPYC with a bfloat16 pool,
the largest adapter for a base like Llama-3.1-8B (all modules, head and embedding at rank 256 in float32, 2,818 MiB)
took 30 of its 211 s and 1,759 of its 3,331 MiB of address space.
"""


WALL_PER_TIME = 10.0
"""Wall-clock limit of a validation, in multiples of its CPU time limit. Validations run at low priority."""


@dataclass(frozen=True, slots=True)
class ValidationJob:
    """The files of one upload, and the paths for its canonical and packed files."""

    config: Path
    tensors: Path
    canonical: Path
    packed: Path
    needs_effect: bool = True
    """Whether to reject an adapter whose products B A are all zero. Trainers publish such a policy before they have
    trained it, but a person who pushes it has saved the wrong file.
    """


@dataclass(frozen=True, slots=True)
class Accepted:
    """An upload that passed validation.

    Its canonical file has been written, and so has its packed file, unless packing needs the base's weights.
    """

    digest: str
    max_rank: int
    num_pages: int
    report: dict[str, Any]
    invocation_tokens: tuple[int, ...] = ()
    """The tokens that activate the adapter; empty if it is always active."""
    vocab_size: int | None = None
    """The adapter's vocabulary size, or None if its embedding and head have as many rows as the base's."""
    task: AdapterTask | None = None
    """What the adapter is for, or None for generation."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one validation process."""

    memory_bytes: int
    file_bytes: int
    time_s: float
    """CPU time in seconds."""

    @property
    def wall_s(self) -> float:
        return WALL_PER_TIME * self.time_s

    @classmethod
    def for_upload(cls, target: PackTarget, tensors_bytes: int) -> Limits:
        """Return limits for a tensors file of `tensors_bytes`, with memory for the largest valid adapter for the base.

        The pages and a large part of the file are never in memory together, so the larger of the two sizes determines
        the limit. The time limit grows with the size of the upload, so a small file gets only the minimum of 10 s.
        """
        largest = max(target.max_packing_bytes, target.max_tensors_bytes)
        # Even a file with a single layer is packed into pages for all layers. Each layer takes as many pages as the
        # largest.
        pages_bytes = min(target.max_packing_bytes, 2 * target.geometry.num_layers * tensors_bytes)
        time_s = max(MIN_TIME_S, (tensors_bytes + pages_bytes) / BYTES_PER_S)
        return cls(_OWN_MEMORY_BYTES + largest, _OWN_FILE_BYTES + largest, time_s)
