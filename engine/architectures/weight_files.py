"""The safetensors files of a model directory, and the tensors in their headers. No weights are read here."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.files.mapped_tensors import map_directory
from loramux.adapter_store.formats.files.safetensors_header import mistaken_format
from loramux.adapter_store.formats.files.text_names import text_name
from loramux.adapter_store.formats.quantization.base_format import (
    CheckpointTensors,
    find_coded,
    is_zero_bias,
    read_format,
)
from loramux.engine.protocol.errors import ModelNotSupported

EMBEDDING, HEAD, HEAD_BIAS = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"

DERIVED = (".rotary_emb.inv_freq",)
"""Name suffixes of tensors that config.json determines. Older versions of transformers stored them."""

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth")
_START_BYTES = 16
"""How much of a file shows its format, in bytes."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's header entry. For a quantised weight (`is_coded`), `dtype` is the dtype of its codes.

    With `is_zero_bias`, it is a bias of zeros that the model need not have.
    """

    dtype: str
    shape: tuple[int, ...]
    is_coded: bool = False
    is_zero_bias: bool = False


def weight_paths(model_dir: Path) -> list[Path]:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Raises ModelNotSupported, also if a file is missing.
    """
    index = model_dir / INDEX
    if not index.is_file():
        if not (model_dir / WHOLE).is_file():
            raise _without_weights(model_dir)
        return [model_dir / WHOLE]
    try:
        names = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelNotSupported(f"{index} is malformed") from error
    if any(Path(name).name != name for name in names):
        raise ModelNotSupported(f"{index} names a file outside the model directory")
    paths = [model_dir / name for name in sorted(names)]
    if (absent := next((path for path in paths if not path.is_file()), None)) is not None:
        raise ModelNotSupported(f"{absent} is missing, but {INDEX} names it: download or save the model again")
    return paths


def _without_weights(model_dir: Path) -> ModelNotSupported:
    """Explain why a model directory has neither whole weights nor an index of shards."""
    names = sorted(path.name for path in model_dir.iterdir())
    if any(name.startswith("model-") and name.endswith(".safetensors") for name in names):
        return ModelNotSupported(f"{model_dir} has shards of the weights, but no {INDEX}: download it, too")
    if gguf := next((name for name in names if name.endswith(".gguf")), None):
        return ModelNotSupported(f"{model_dir} has no {WHOLE}: to serve a GGUF model, name its file, {gguf}")
    found = ""
    if pickle := next(
        (name for name in names if name.startswith(("pytorch_model", "consolidated")) and name.endswith(_PICKLES)), None
    ):
        found = f", and {pickle} is a pickle, which loramux never reads"
    return ModelNotSupported(f"{model_dir} has no {WHOLE}{found}: save the model with save_pretrained of transformers")


def stored_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """The tensors of a model directory by name, without reading weights. Raises ModelNotSupported.

    Quantised weights have the names and shapes that they would have in a float checkpoint.
    """
    found: set[str] = set()
    for path in weight_paths(model_dir):
        try:
            with safe_open(path, framework="np") as file:
                found.update(name for name, _ in text_tensors(file.keys(), found))
        except (SafetensorError, OSError) as error:
            raise unreadable(path, error) from error
    checkpoint = checkpoint_of(model_dir)
    plain = {
        name: StoredTensor(tensor.dtype, tensor.shape, is_zero_bias=is_zero_bias(name, checkpoint))
        for name, tensor in checkpoint.plain.items()
    }
    return plain | {name: StoredTensor(it.dtype, it.shape, True) for name, it in checkpoint.coded.items()}


def checkpoint_of(model_dir: Path, quantized_dir: Path | None = None) -> CheckpointTensors:
    """The quantised and the plain tensors of a model directory. Raises ModelNotSupported.

    Requires that safetensors can open the directory's files.

    Weights in `quantized_dir` replace weights with the same name.
    """
    try:
        found = find_coded(read_format(model_dir), map_directory(model_dir))
        if quantized_dir is None:
            return found
        return found.with_coded(find_coded(read_format(quantized_dir), map_directory(quantized_dir)))
    except BaseNotSupported as error:
        raise ModelNotSupported(str(error)) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelNotSupported(f"the weights of {model_dir} cannot be read: {error}") from error


def text_tensors(stored_names: Iterable[str], found: Container[str]) -> Iterator[tuple[str, str]]:
    """For each tensor of the text decoder in a file, yield its name in a text-only model and its name in the file.

    Raises ModelNotSupported if a name occurs twice or is in `found`, the names in earlier files.
    """
    names: set[str] = set()
    for stored in stored_names:
        name = text_name(stored)
        if name is None:
            continue
        if name in found or name in names:
            raise ModelNotSupported(f"the model has two tensors named {name}")
        names.add(name)
        yield name, stored


def unreadable(path: Path, error: Exception) -> ModelNotSupported:
    try:
        with path.open("rb") as file:
            mistake = mistaken_format(file.read(_START_BYTES))
    except OSError:
        mistake = None
    return ModelNotSupported(f"{path} {mistake or f'is not a readable safetensors file: {error}'}")
