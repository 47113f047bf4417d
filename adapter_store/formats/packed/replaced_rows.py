"""Finds and packs the rows of the base's embedding and head that an adapter replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.float_formats import to_pool_dtype
from loramux.adapter_store.formats.packed.canonical import CanonicalAdapter
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.trained_rows import TrainedRows, tokens_of
from loramux.adapter_store.formats.quantization.base_weights import WeightRows
from loramux.kernels.layout import (
    MAX_EXTRA_TOKENS,
    AdapterLayout,
    LinearShape,
    RowCounts,
    row_layout,
    trained_rows_of,
)

NO_TOKENS: npt.NDArray[np.int64] = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """The tokens whose rows an adapter replaces in each outer module: IDs in ascending order, int64."""

    tokens: Mapping[str, npt.NDArray[np.int64]]
    counts: RowCounts


def replaced_rows(file: CanonicalAdapter, target: PackTarget, base: WeightRows | None) -> ReplacedRows:
    """Find the rows that an adapter replaces.

    `base` is required if the adapter replaces whole weights. Rows of a whole weight that equal the base's rows in the
    pool's dtype are left out. Raises AdapterRejected if the adapter was made for another base.
    """
    modules = target.outer_modules
    if not file.trained.keys() <= {module.name for module in modules}:
        raise AdapterRejected("base_mismatch", "the adapter replaces modules that the base model does not have")
    if file.vocab_size is not None:
        _check_vocabulary(file, file.vocab_size, target)
    found = [file.trained.get(module.name) for module in modules]
    is_shared = target.tied_embeddings and len(modules) > 1 and all(rows == found[0] for rows in found)
    tokens: dict[str, npt.NDArray[np.int64]] = {}
    for index, (module, rows) in enumerate(zip(modules, found, strict=True)):
        if rows is None:
            tokens[module.name] = NO_TOKENS
        elif is_shared and index:
            tokens[module.name] = tokens[modules[0].name]
        else:
            tokens[module.name] = _changed(file, module, rows, target, base)
    changed = next((key for key, ids in tokens.items() if len(ids)), None)
    if file.is_activated and changed is not None:
        raise AdapterRejected(
            "base_mismatch",
            "the file contains weights that differ from the base's, which an activated LoRA cannot change: train it on "
            "this base, or save it with save_pretrained(..., save_embedding_layers=False)",
            file.trained[changed].whole,
        )
    if not file.trained:
        return ReplacedRows(tokens, RowCounts())
    counts = tuple(len(tokens[module.name]) for module in modules)
    return ReplacedRows(tokens, RowCounts(counts, is_shared, file.vocab_size, file.num_labels))


def write_rows(
    file: CanonicalAdapter,
    replaced: ReplacedRows,
    layout: AdapterLayout,
    stream: npt.NDArray[Any],
    target: PackTarget,
) -> None:
    """Write the replaced rows and their token IDs into the stream of the outer modules."""
    for index, module in enumerate(target.outer_modules):
        tokens = replaced.tokens[module.name]
        if not len(tokens) or (layout.rows.is_shared and index):
            continue
        rows = file.trained[module.name]
        begin, first_id = (int(offset) for offset in layout.row_offsets[index, :2])
        row_len = trained_rows_of(module)[1]
        padded_len = row_layout(row_len, target.geometry.flat.adapter_elements).padded_len
        at = stream[begin : begin + len(tokens) * padded_len].reshape(len(tokens), padded_len)[:, :row_len]
        if rows.whole is not None:
            for block in file.blocks(rows.whole):
                first, end = tokens.searchsorted((block.start, block.stop))
                if first < end:
                    values = file.converted(rows.whole, target.dtype, block)
                    at[first:end] = values[tokens[first:end] - block.start]
        if rows.delta is not None:
            ids, values = np.array(rows.ids, np.int64), file.converted(rows.delta, target.dtype)
            is_ours = np.isin(ids, tokens)
            at[tokens.searchsorted(ids[is_ours])] = values[is_ours]
        if len(tokens) < len(tokens_of(module)):
            stream.view("<i4")[first_id : first_id + len(tokens)] = tokens


class LoadedWeights:
    """The base's weights after PEFT has loaded an adapter: rows in the file replace the base's rows."""

    def __init__(self, file: CanonicalAdapter, base: WeightRows) -> None:
        self._file = file
        self._base = base

    def rows(self, module: str, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return rows `[begin, end)` of a module's weight, float32 `[end - begin, row_len]`."""
        trained = self._file.trained.get(module)
        if trained is None:
            return self._base.rows(module, begin, end)
        if trained.whole is None:
            values = self._base.rows(module, begin, end).copy()
        else:
            values = self._file.converted(trained.whole, "float32", range(begin, end)).copy()
        if trained.delta is not None:
            ids = np.array(trained.ids, np.int64)
            is_within = (ids >= begin) & (ids < end)
            values[ids[is_within] - begin] = self._file.float32(trained.delta)[is_within]
        return values

    def bias(self, module: str) -> npt.NDArray[np.float32] | None:
        return self._base.bias(module)


def _changed(
    file: CanonicalAdapter, module: LinearShape, rows: TrainedRows, target: PackTarget, base: WeightRows | None
) -> npt.NDArray[np.int64]:
    """Return the tokens whose rows are trained or differ from the base's."""
    if not _fits(rows, file, module):
        raise AdapterRejected("base_mismatch", "the adapter was made for another base model", module.name)
    tokens, num_tokens = np.array(sorted(rows.ids), np.int64), len(tokens_of(module, file.vocab_size))
    if rows.whole is not None:
        assert base is not None, "packing a whole weight needs the base's weights"
        num_rows, _ = trained_rows_of(module)
        for block in file.blocks(rows.whole):
            end = min(block.stop, num_rows)
            if block.start < end:
                values = file.converted(rows.whole, target.dtype, range(block.start, end))
                is_changed = values != to_pool_dtype(base.rows(module.name, block.start, end), target.dtype)
                tokens = np.append(tokens, block.start + np.flatnonzero(is_changed.any(axis=1)))
            tokens = np.append(tokens, np.arange(max(block.start, num_rows), block.stop))
        tokens = np.unique(tokens)
    if num_tokens > len(tokens) >= len(tokens_of(module)):
        # If at least as many rows are replaced as the base has, they are stored without ids, so none may be missing.
        if rows.whole is None:
            raise AdapterRejected("base_mismatch", "the adapter was made for another base model", module.name)
        tokens = np.arange(num_tokens)
    return tokens


def _check_vocabulary(file: CanonicalAdapter, vocab_size: int, target: PackTarget) -> None:
    """Raise AdapterRejected unless the file has all rows that this base lacks."""
    for module in target.outer_modules:
        num_rows, rows = trained_rows_of(module)[0], file.trained.get(module.name)
        beyond = range(num_rows, vocab_size)
        is_complete = rows is not None and (rows.has_all(beyond) if beyond else rows.whole is not None)
        if not is_complete or not 0 < vocab_size <= num_rows + MAX_EXTRA_TOKENS:
            raise AdapterRejected("base_mismatch", "the adapter was made for another base model", module.name)


def _fits(rows: TrainedRows, file: CanonicalAdapter, module: LinearShape) -> bool:
    """Return whether the replaced rows have the shapes and token ids that the base's weight requires."""
    num_rows, row_len = trained_rows_of(module)
    num_rows = num_rows if file.vocab_size is None else file.vocab_size
    wanted = {rows.whole: (num_rows, row_len), rows.delta: (len(rows.ids), row_len)}
    shapes = {name: entry.shape for name, entry in file.header.tensors.items()}
    are_ids = len(set(rows.ids)) == len(rows.ids) and all(0 <= token < num_rows for token in rows.ids)
    return are_ids and all(shapes.get(name) == shape for name, shape in wanted.items() if name is not None)
