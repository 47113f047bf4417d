"""Converts an adapter that mlx-lm has trained to PEFT's two files.

mlx-lm writes the transposes of PEFT's A and B to `adapters.safetensors`, and a scale in place of alpha to
`adapter_config.json`. Its magnitudes are those of PEFT's DoRA.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, MLX_FILE, TENSORS_FILE
from loramux.adapter_store.formats.files.safetensors_header import LENGTH_BYTES, TensorEntry
from loramux.adapter_store.formats.files.strict_json import DuplicateKey, InvalidJson, parse_strict_json
from loramux.adapter_store.formats.files.tensor_file import BLOCK_ELEMENTS, TensorFile
from loramux.adapter_store.formats.packed.module_places import A_SUFFIX, B_SUFFIX, MAGNITUDE_SUFFIX, TENSOR_PREFIX
from loramux.adapter_store.formats.version_files.peft_document import peft_document
from loramux.kernels.layout import MAX_RANK

MAX_SCALE = 65536.0
"""Largest scale, and largest alpha and rank in the hint about alpha."""

_SUFFIXES = {"lora_a": A_SUFFIX, "lora_b": B_SUFFIX, "m": MAGNITUDE_SUFFIX}
"""PEFT's suffixes of the names of tensors, by mlx-lm's."""


def convert_mlx(directory: Path, destination: Path) -> None:
    """Write PEFT's two files of the adapter in `directory` into the directory `destination`. Raises AdapterRejected.

    The shapes are not compared with a base, because validation does that. Memory use is bounded, because validation
    runs in a sandbox and the conversion does not.
    """
    scale, use_dora = _settings((directory / CONFIG_FILE).read_bytes())
    with _opened(directory / MLX_FILE) as file:
        entries = {_peft_name(name): entry for name, entry in file.header.tensors.items()}
        for name, entry in entries.items():
            _check_shape(name, entry)
        ranks = {
            name.removeprefix(TENSOR_PREFIX).removesuffix(A_SUFFIX): entry.shape[1]
            for name, entry in entries.items()
            if name.endswith(A_SUFFIX)
        }
        if not ranks:
            raise AdapterRejected("missing_tensor", "the file has no lora_a", MLX_FILE)
        rank = max(ranks.values())
        if set(ranks.values()) != {rank}:
            raise AdapterRejected("rank_mismatch", "the ranks of the modules differ", MLX_FILE)
        document = peft_document(ranks, scale * rank, use_dora=use_dora)
        (destination / CONFIG_FILE).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
        header = _header(entries)
        with (destination / TENSORS_FILE).open("wb") as out:
            out.write(len(header).to_bytes(LENGTH_BYTES, "little"))
            out.write(header)
            for name, entry in entries.items():
                if name.endswith(A_SUFFIX):
                    _write_a(file, entry, out)
                elif name.endswith(B_SUFFIX):
                    _write_b(file, entry, out)
                else:
                    out.writelines(file.stored(entry.name))


def _settings(text: bytes) -> tuple[float, bool]:
    """Return the scale, and whether the adapter is a DoRA."""
    try:
        config = parse_strict_json(text)
    except (DuplicateKey, InvalidJson) as error:
        raise AdapterRejected("invalid_config", f"the configuration is not JSON: {error}", CONFIG_FILE) from None
    lora = config.get("lora_parameters") if isinstance(config, dict) else None
    if not isinstance(lora, dict):
        message = f"beside {MLX_FILE}, the configuration must be mlx-lm's, with lora_parameters"
        raise AdapterRejected("invalid_config", message, "lora_parameters")
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        message = "mlx-lm has trained all weights, not an adapter: serve the model as a base"
        raise AdapterRejected("unsupported_config", message, "fine_tune_type")
    scale: Any = lora.get("scale")
    if not _is_positive(scale):
        message = f"the scale must be a positive number, at most {MAX_SCALE:g}"
        raise AdapterRejected("invalid_config", message, "lora_parameters.scale")
    _check_alpha(lora, float(scale))
    return float(scale), kind == "dora"


def _check_alpha(lora: Mapping[str, Any], scale: float) -> None:
    """Refuse an alpha, which only earlier releases of mlx-lm multiply by, unless it has no effect in any release."""
    alpha, rank = lora.get("alpha"), lora.get("rank")
    if alpha is None or alpha == rank:
        return
    hint = f", {scale * alpha / rank:g}" if _is_positive(alpha) and _is_positive(rank) else ""
    message = (
        "releases of mlx-lm differ in whether the scale is multiplied by alpha / rank: remove alpha and, if the "
        f"adapter was trained with a release that knows alpha, set scale to the product{hint}"
    )
    raise AdapterRejected("invalid_config", message, "lora_parameters.alpha")


def _is_positive(value: Any) -> bool:
    # JSON can have integers that are too large for a float.
    return type(value) in (int, float) and 0 < value <= MAX_SCALE


def _opened(path: Path) -> TensorFile:
    try:
        # Validation refuses links, which are common in the cache of a hub.
        return TensorFile(path.resolve())
    except AdapterRejected as error:
        if error.code == "tensor_not_2d" and ".switch_mlp." in (error.param or ""):
            message = "mlx-lm's LoRAs of experts are not served: train without the keys mlp.switch_mlp.*"
            raise AdapterRejected("unexpected_tensor", message, error.param) from None
        raise


def _peft_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if leaf not in _SUFFIXES:
        raise AdapterRejected("unexpected_tensor", "only lora_a, lora_b and m of modules are expected", name)
    if module.endswith("embed_tokens"):
        # mlx-lm also changes a tied head, and the files do not say whether the base ties it.
        message = "mlx-lm's LoRAs of the embedding are not served: train without the key model.embed_tokens"
        raise AdapterRejected("unexpected_tensor", message, name)
    return TENSOR_PREFIX + module + _SUFFIXES[leaf]


def _check_shape(name: str, entry: TensorEntry) -> None:
    is_a, is_b = name.endswith(A_SUFFIX), name.endswith(B_SUFFIX)
    # Opening the file does not check the shapes of tensors that validation ignores.
    if (is_a or is_b) and len(entry.shape) != 2:
        raise AdapterRejected("tensor_not_2d", "lora_a and lora_b must have two dimensions", entry.name)
    if not (is_a or is_b) and len(entry.shape) != 1:
        raise AdapterRejected("wrong_dimensions", "m must have one dimension", entry.name)
    if (is_a and entry.shape[1] > MAX_RANK) or (is_b and entry.shape[0] > MAX_RANK):
        raise AdapterRejected("rank_out_of_range", f"a rank must be between 1 and {MAX_RANK}", entry.name)


def _write_a(file: TensorFile, entry: TensorEntry, out: BinaryIO) -> None:
    """Write PEFT's A `[rank, in_features]` of a lora_a `[in_features, rank]`."""
    in_features, rank = entry.shape
    start, item_bytes = out.tell(), (entry.end - entry.begin) // (in_features * rank)
    for rows in file.blocks(entry.name):
        block = file.raw_rows(entry.name, rows).T
        if len(rows) == in_features:
            # The file can have thousands of small matrices, whose rows would each take a call.
            out.write(np.ascontiguousarray(block).data)
            return
        for index in range(rank):
            out.seek(start + (index * in_features + rows.start) * item_bytes)
            out.write(np.ascontiguousarray(block[index]).data)


def _write_b(file: TensorFile, entry: TensorEntry, out: BinaryIO) -> None:
    """Write PEFT's B `[out_features, rank]` of a lora_b `[rank, out_features]`."""
    rank, out_features = entry.shape
    step = BLOCK_ELEMENTS // rank
    for begin in range(0, out_features, step):
        columns = range(begin, min(begin + step, out_features))
        out.write(np.ascontiguousarray(file.raw_columns(entry.name, columns).T).data)


def _header(entries: Mapping[str, TensorEntry]) -> bytes:
    document: dict[str, object] = {}
    position = 0
    for name, entry in entries.items():
        end = position + entry.end - entry.begin
        document[name] = {"dtype": entry.dtype, "shape": entry.shape[::-1], "data_offsets": (position, end)}
        position = end
    header = json.dumps(document, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % LENGTH_BYTES)
