"""The target of validation and packing: the base model's linear layers, the page size and the pool's dtype."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from loramux.kernels.layout import (
    MAX_ELEMENTS,
    MAX_EXTRA_TOKENS,
    MAX_RANK,
    NO_ROWS,
    AdapterLayout,
    ExpertLinear,
    ExpertModules,
    LinearShape,
    NormShape,
    PageGeometry,
    RowCounts,
    adapter_layout,
    row_layout,
    trained_rows_of,
)

T = TypeVar("T", bound=np.generic)

PACK_FORMAT = 4
"""Version of the packed file. When it increases, every packed file is rebuilt."""

FP8 = "float8_e4m3"
"""The dtype of adapters that are stored as FP8 codes: see `fp8.py`."""

_STORAGE: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2"), FP8: np.dtype("u1")}
_WIDEST_ITEMSIZE = 4
_MAX_HEADER_BYTES = 1 << 20
_MAX_ENTRY_BYTES = 256
"""Space for one expert tensor's name and entry in a header, in bytes. Most need about 170."""


@dataclass(frozen=True, slots=True)
class PackTarget:
    """The engine for which adapters are validated and packed: its modules, page geometry and dtype.

    `modules` have the names that PEFT uses within a layer, and some layers may lack a module. `dtype` is float32,
    bfloat16 or FP8. `experts` describes the linear layers of the base's experts, which `all_modules` lists after
    `modules`. `norms` are the norms that adapters can replace, which `all_modules` lists last. `outer_modules` are
    the modules outside the layers, by full name. With `tied_embeddings`, the base's head uses the weight of its
    embedding. With `has_fixed_vocabulary`, adapters cannot have tokens beyond the base's. `draft_modules` are the
    linear layers of the base's own head for drafts that adapters may change, by full name.
    """

    modules: tuple[LinearShape, ...]
    geometry: PageGeometry
    dtype: str
    outer_modules: tuple[LinearShape, ...] = ()
    tied_embeddings: bool = False
    experts: ExpertModules | None = None
    has_fixed_vocabulary: bool = False
    norms: tuple[NormShape, ...] = ()
    draft_modules: tuple[LinearShape, ...] = ()

    def __post_init__(self) -> None:
        storage = _STORAGE.get(self.dtype)
        if storage is None or storage.itemsize != self.geometry.adapter_itemsize:
            raise ValueError(
                f"adapters of dtype {self.dtype!r} do not fit pages of {self.geometry.adapter_itemsize}-byte elements"
            )

    @property
    def all_modules(self) -> tuple[LinearShape, ...]:
        """The modules of a layer: `modules`, then the experts' linear layers, then the norms.

        Rank tables, scale tables and pages list modules in this order.
        """
        return _all_modules(self)

    @property
    def all_outer_modules(self) -> tuple[LinearShape, ...]:
        """The modules of an adapter's outer stream: `outer_modules`, then `draft_modules`."""
        return self.outer_modules + self.draft_modules

    @property
    def without_drafter(self) -> PackTarget:
        """The target of adapters that leave the head for drafts as it is. Their packed files do not mention it."""
        return replace(self, draft_modules=()) if self.draft_modules else self

    @property
    def vocab_size(self) -> int | None:
        """The base's vocabulary size, or None for a target without an embedding."""
        return next((module.in_features for module in self.outer_modules if module.is_embedding), None)

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """The numpy dtype of packed elements. bfloat16 and FP8 are stored as their bits."""
        return _STORAGE[self.dtype]

    @property
    def in_float32(self) -> PackTarget:
        """This target with elements in float32."""
        return replace(self, dtype="float32", geometry=replace(self.geometry, adapter_itemsize=4))

    @property
    def pack_key(self) -> str:
        """Identifies the layout: engines whose targets have equal keys can load the same packed files."""
        # Only a few adapters change the head for drafts. The packed files of all others are the same without a head.
        identity = {"format": PACK_FORMAT, **self.without_drafter.document()}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def max_tensors_bytes(self) -> int:
        """Size of the largest valid safetensors file, in bytes: every module at its maximum rank, in float32.

        The size includes the whole weight of each outer module, with up to MAX_EXTRA_TOKENS tokens beyond the base's
        vocabulary.
        """
        elements = self.geometry.num_layers * _max_elements(self.modules) + _max_elements(self.all_outer_modules)
        for num_rows, row_len in map(trained_rows_of, self.outer_modules):
            elements += (num_rows + MAX_EXTRA_TOKENS) * row_len
        elements += sum(norm.size * (1 + norm.has_bias) for norm in self.norms) * self.geometry.num_layers
        if self.experts is not None:
            linears = (linear for linear, counts in self._expert_linears if counts)
            of_one = _max_elements(linears)
            elements += self._num_expert_layers * self.experts.num_experts * of_one
        return self.max_header_bytes + 8 + elements * _WIDEST_ITEMSIZE

    @property
    def max_header_bytes(self) -> int:
        """Largest header of an uploaded safetensors file, in bytes, with room for the tensors of each expert."""
        if self.experts is None:
            return _MAX_HEADER_BYTES
        num_tensors = 3 * self._num_expert_layers * self.experts.num_experts * len(self.experts.linears)
        return _MAX_HEADER_BYTES + num_tensors * _MAX_ENTRY_BYTES

    @property
    def _expert_linears(self) -> Iterable[tuple[ExpertLinear, bool]]:
        assert self.experts is not None
        return zip(self.experts.linears, self.experts.largest, strict=True)

    @property
    def _num_expert_layers(self) -> int:
        assert self.experts is not None
        return self.geometry.num_layers if self.experts.layers is None else len(self.experts.layers)

    @property
    def max_pages(self) -> int:
        """Upper bound on an adapter's pages, with every module at its maximum rank and all rows trained."""
        ranks, outer_ranks = self.equal_ranks(MAX_RANK), np.full(len(self.all_outer_modules), MAX_RANK, np.int32)
        if self.norms:
            ranks[:, -len(self.norms) :] = 1
        try:
            without_rows = self.layout(ranks, outer_ranks, has_affines=True).num_pages
        except ValueError:
            # Offsets cannot address the largest adapter. Validation refuses adapters with more than MAX_ELEMENTS
            # elements.
            without_rows = -(-MAX_ELEMENTS // self.geometry.adapter_elements)
        page_elements = self.geometry.flat.adapter_elements
        shapes = [trained_rows_of(module) for module in self.outer_modules]
        rows = sum(
            (count + MAX_EXTRA_TOKENS) * row_layout(row_len, page_elements).padded_len for count, row_len in shapes
        )
        # Alignment can add up to one page.
        return without_rows + (-(-min(rows, MAX_ELEMENTS) // page_elements) + 1 if rows else 0)

    @property
    def max_payload_bytes(self) -> int:
        """Largest packed size of an adapter, in bytes."""
        return self.max_pages * self.geometry.total_page_bytes

    @property
    def max_packing_bytes(self) -> int:
        """Memory for the pages of the largest adapter while it is packed. FP8 codes are computed from float32 pages."""
        wide = self.in_float32.max_payload_bytes if self.dtype == FP8 else 0
        return wide + self.max_payload_bytes

    def equal_ranks(self, rank: int) -> npt.NDArray[np.int32]:
        """Return the ranks, int32 `[num_layers, num_modules]`, of an adapter with this rank on every linear layer.

        If one linear layer of an expert contains another, only the larger one has a rank.
        """
        layers = range(self.geometry.num_layers)
        ranks = [rank] * len(self.modules)
        if self.experts is not None:
            of_one = [rank * counts for _, counts in self._expert_linears]
            ranks += of_one * self.experts.num_experts
        ranks += [0] * len(self.norms)
        is_there = np.array([[module.is_in(layer) for module in self.all_modules] for layer in layers])
        return np.where(is_there, np.array(ranks, np.int32), np.int32(0))

    def layout(
        self,
        ranks: npt.NDArray[np.int32],
        outer_ranks: npt.NDArray[np.int32] | None = None,
        has_affines: bool = False,
        rows: RowCounts = NO_ROWS,
    ) -> AdapterLayout:
        """Return the layout of an adapter with these `ranks`, int32 `[num_layers, num_modules]`.

        `outer_ranks` is int32 `[num_outer_modules]`, for the first of `all_outer_modules`. The others have rank 0, and
        so have all if it is None. `rows` counts the trained rows.
        """
        outer_ranks = self.of_all_outer(np.zeros(0, np.int32) if outer_ranks is None else outer_ranks)
        if ranks.shape != (self.geometry.num_layers, len(self.all_modules)):
            raise ValueError(f"ranks have shape {ranks.shape}")
        tables = ranks.astype(np.int32).tobytes(), outer_ranks.astype(np.int32).tobytes()
        return _layout(self, *tables, has_affines, rows)

    def of_all_outer(self, values: npt.NDArray[T]) -> npt.NDArray[T]:
        """Return `values` of the first outer modules, with zeros for the others."""
        return np.pad(values, (0, len(self.all_outer_modules) - len(values)))

    def document(self) -> dict[str, Any]:
        """Return this target as plain JSON values, for packed files and the validation process."""
        # An adapter's pages do not depend on the scales of K and V, which are outside of the pages.
        geometry = asdict(self.geometry)
        del geometry["elements_per_scale"]
        document = {
            "modules": [_module_document(module) for module in self.modules],
            "geometry": geometry,
            "dtype": self.dtype,
            "outer_modules": [_module_document(module) for module in self.outer_modules],
            "tied_embeddings": self.tied_embeddings,
            # Constants, so that packed files written by earlier versions stay valid.
            "tp_size": 1,
            "tp_rank": 0,
        }
        # False is omitted, so that packed files written before this field existed stay valid.
        if self.has_fixed_vocabulary:
            document["has_fixed_vocabulary"] = True
        if self.norms:
            document["norms"] = [asdict(norm) for norm in self.norms]
        if self.draft_modules:
            document["draft_modules"] = [_module_document(module) for module in self.draft_modules]
        return document if self.experts is None else {**document, "experts": _experts_document(self.experts)}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> PackTarget:
        return cls(
            modules=tuple(_parse_module(module) for module in document["modules"]),
            geometry=PageGeometry(**document["geometry"]),
            dtype=document["dtype"],
            outer_modules=tuple(_parse_module(module) for module in document["outer_modules"]),
            tied_embeddings=document["tied_embeddings"],
            experts=_parse_experts(document.get("experts")),
            has_fixed_vocabulary=document.get("has_fixed_vocabulary", False),
            norms=tuple(NormShape(**_with_layers(norm)) for norm in document.get("norms", ())),
            draft_modules=tuple(_parse_module(module) for module in document.get("draft_modules", ())),
        )


def _module_document(module: LinearShape) -> dict[str, Any]:
    document = asdict(module)
    if module.layers is None:
        # Omitted, so that packed files written before this field existed stay valid.
        del document["layers"]
    if not module.has_bias:
        # Omitted for the same reason.
        del document["has_bias"]
    return document


def _parse_module(document: dict[str, Any]) -> LinearShape:
    return LinearShape(**_with_layers(document))


def _with_layers(document: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a document whose list of layers becomes a tuple."""
    layers = document.get("layers")
    return {**document, "layers": None if layers is None else tuple(layers)}


def _experts_document(experts: ExpertModules) -> dict[str, Any]:
    document = asdict(experts)
    for linear in document["linears"]:
        if not linear["alternates"]:
            # Omitted, so that packed files written before this field existed stay valid.
            del linear["alternates"]
    return document


def _parse_experts(document: dict[str, Any] | None) -> ExpertModules | None:
    if document is None:
        return None
    layers = document["layers"]
    return ExpertModules(
        num_experts=document["num_experts"],
        linears=tuple(ExpertLinear(**linear) for linear in document["linears"]),
        router=document["router"],
        stacked_router=document["stacked_router"],
        layers=None if layers is None else tuple(layers),
    )


@lru_cache(maxsize=16)
def _all_modules(target: PackTarget) -> tuple[LinearShape, ...]:
    experts = () if target.experts is None else target.experts.modules
    return (*target.modules, *experts, *(norm.linear for norm in target.norms))


@lru_cache(maxsize=256)
def _layout(target: PackTarget, ranks: bytes, outer_ranks: bytes, has_affines: bool, rows: RowCounts) -> AdapterLayout:
    """Compute an adapter's layout.

    The result is cached: computing it takes longer than checking a small adapter's bytes, and most adapters share a
    few layouts.
    """
    modules, outer_modules = target.all_modules, target.all_outer_modules
    table = np.frombuffer(ranks, np.int32).reshape(target.geometry.num_layers, len(modules))
    return adapter_layout(
        target.geometry, modules, table, outer_modules, np.frombuffer(outer_ranks, np.int32), has_affines, rows
    )


def _max_elements(modules: Iterable[LinearShape | ExpertLinear]) -> int:
    """Return the number of elements of these modules at the maximum rank.

    Each output also has a magnitude or a bias and, if the base has a bias, a trained one.
    """
    return sum(
        MAX_RANK * (module.in_features + module.out_features)
        + module.out_features * (2 if isinstance(module, LinearShape) and module.has_bias else 1)
        for module in modules
    )
