"""Makes a small model directory for a GGUF model, so that everything that reads a model directory can read the file.

The directory has `config.json`, the tokenizer's files, the model's vectors in `model.safetensors`, and an index of the
matrices, which stay in the GGUF file. It is made once for each content of the file, and replaced when the file changes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import ConversionRefused, printable
from loramux.adapter_store.formats.files.file_names import GENERATION_FILE
from loramux.adapter_store.formats.files.float_formats import STORAGE, to_float32
from loramux.adapter_store.formats.files.mapped_tensors import GGUF_INDEX
from loramux.adapter_store.formats.files.tensor_writer import write_tensors
from loramux.adapter_store.formats.quantization.gguf_blocks import BLOCK_TYPES, stored_bytes
from loramux.adapter_store.gguf.base_config import config_fields, special_tokens
from loramux.adapter_store.gguf.base_metadata import BaseMetadata
from loramux.adapter_store.gguf.base_pooling import pooling_files
from loramux.adapter_store.gguf.base_records import RECORDS, find_record
from loramux.adapter_store.gguf.base_rope import FACTORS
from loramux.adapter_store.gguf.base_tensors import BaseTensors, place_tensors
from loramux.adapter_store.gguf.gguf_header import GgufTensor, HeaderParser, HeaderRules, open_regular
from loramux.adapter_store.gguf.tokenizer_files import tokenizer_files

MAX_HEADER_BYTES = 256 << 20
"""Largest header, up to the tensors' data, in bytes. A tokenizer with 262,144 tokens needs about 15 million bytes."""

MAX_ELEMENTS = 1 << 22
"""Most elements of a header's arrays together. A tokenizer has three arrays with an element for each token, and merges.
"""

MAX_FILES = 1024
VERSION = 2
"""Increased when the content of the directories changes, so that directories from older versions are not used."""

SUFFIX = ".gguf"
_RULES = HeaderRules(
    max_bytes=MAX_HEADER_BYTES,
    max_elements=MAX_ELEMENTS,
    dtypes=frozenset((*STORAGE, *BLOCK_TYPES)),
    advice=f"use a file with the types {', '.join((*STORAGE, *BLOCK_TYPES))}",
)
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.ASCII)
_SAMPLE_BYTES = 1 << 20
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class _Part:
    """One file of a model, mapped into memory."""

    path: Path
    data: mmap.mmap
    size: int
    mtime_ns: int


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def model_name(path: Path) -> str:
    """The name of a GGUF model: its file's name without `.gguf` and the number of the part."""
    match = _PART.fullmatch(path.name)
    return path.name[: -len(SUFFIX)] if match is None else match[1]


def base_directory(path: Path, root: Path) -> Path:
    """Return the directory below `root` for the model in `path`, the only or the first file of a GGUF model.

    Raises ConversionRefused.
    """
    with ExitStack() as stack:
        parts = [_open(one, stack) for one in _parts(path)]
        place = hashlib.sha256(os.fsencode(parts[0].path)).hexdigest()[:16]
        directory = root / f"{place}-{_key(parts)}"
        if directory.is_dir():
            return directory
        metadata, tensors, file_of = _read(parts)
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=root))
            try:
                _write(unfinished, parts, metadata, tensors, file_of)
                for old in root.glob(f"{place}-*"):
                    shutil.rmtree(old, ignore_errors=True)
                if not directory.is_dir():
                    os.replace(unfinished, directory)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        except OSError as error:
            message = f"the model's directory cannot be written to {root}: {error.strerror}"
            raise ConversionRefused("not_writable", message) from error
        return directory


def _parts(path: Path) -> list[Path]:
    path = Path(os.path.abspath(path))
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= count <= MAX_FILES:
        raise ConversionRefused("missing_part", f"a model in {count} files is not supported", path.name)
    names = [f"{stem}-{index:05}-of-{count:05}{SUFFIX}" for index in range(1, count + 1)]
    if number != 1:
        raise ConversionRefused("missing_part", f"choose the model's first file, {printable(names[0], 200)}", path.name)
    for name in names:
        if not (path.parent / name).is_file():
            message = f"the model has {count} files, but {printable(name, 200)} is missing"
            raise ConversionRefused("missing_part", message, name)
    return [path.parent / name for name in names]


def _open(path: Path, stack: ExitStack) -> _Part:
    file: BinaryIO = stack.enter_context(open_regular(path))
    status = os.fstat(file.fileno())
    if not status.st_size:
        raise ConversionRefused("not_gguf", "the file is empty")
    data = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return _Part(path, data, status.st_size, status.st_mtime_ns)


def _key(parts: list[_Part]) -> str:
    """Identifies the files. Most of a header is in the sample, and a changed file has another time or size."""
    hashed = hashlib.sha256(f"{VERSION}".encode())
    for part in parts:
        hashed.update(f" {part.size} {part.mtime_ns} ".encode())
        hashed.update(part.data[:_SAMPLE_BYTES])
    return hashed.hexdigest()[:32]


def _read(parts: list[_Part]) -> tuple[dict[str, Any], dict[str, GgufTensor], dict[str, int]]:
    """Return the first file's metadata, all tensors, and the number of each tensor's file."""
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    file_of: dict[str, int] = {}
    for number, part in enumerate(parts):
        found, declared = HeaderParser(part.data, part.size, _RULES).parse()
        if found.get("split.count", 1) not in (len(parts), 0) or found.get("split.no", 0) != number:
            message = "the number of the file in its header differs from the number in its name"
            raise ConversionRefused("missing_part", message, part.path.name)
        metadata = metadata or found
        twice = declared.keys() & tensors.keys()
        if twice:
            raise ConversionRefused("duplicate_key", "a tensor appears in two files", min(twice))
        tensors.update(declared)
        file_of.update(dict.fromkeys(declared, number))
    return metadata, tensors, file_of


def _write(
    directory: Path,
    parts: list[_Part],
    metadata: dict[str, Any],
    tensors: dict[str, GgufTensor],
    file_of: dict[str, int],
) -> None:
    if metadata.get("general.type", "model") != "model":
        kind = printable(str(metadata["general.type"]), 40)
        advice = "; check an adapter against its base, with --model" if kind == "adapter" else ""
        raise ConversionRefused("unsupported_gguf", f"general.type is {kind}, not model{advice}", "general.type")
    stated = BaseMetadata(metadata, tensors)
    record = find_record(stated)
    if record is None:
        shown, known = printable(stated.architecture, 60), ", ".join(RECORDS)
        message = f"the architecture {shown} is not supported; supported: {known}"
        raise ConversionRefused("unsupported_architecture", message, "general.architecture")

    def floats(tensor: GgufTensor) -> npt.NDArray[np.float32]:
        return _floats(parts[file_of[tensor.name]], tensor)

    factors = {name: floats(tensors[name]) for name in FACTORS if name in tensors}
    pooling = pooling_files(stated)
    config, tokens = config_fields(stated, record, factors), special_tokens(stated)
    placed = place_tensors(record, config, tensors, floats)
    config |= {"dtype": _dtype(placed), **tokens}
    if placed.types:
        config["quantization_config"] = {"quant_method": "gguf", "types": placed.types}
    _write_json(directory / "config.json", config)
    _write_json(directory / GENERATION_FILE, tokens)
    for name, content in pooling.items():
        (directory / name).parent.mkdir(exist_ok=True)
        _write_json(directory / name, content)
    if "tokenizer.ggml.model" in metadata:
        # Its list of the tokens that end an answer is longer than the metadata's.
        for name, content in tokenizer_files(metadata).items():
            (directory / name).write_bytes(content)
        num_tokens, num_rows = len(metadata["tokenizer.ggml.tokens"]), config["vocab_size"]
        if num_tokens > num_rows:
            message = f"the tokenizer has {num_tokens} tokens, but the embedding has {num_rows} rows"
            raise ConversionRefused("base_mismatch", message, "token_embd.weight")
    index = {
        "files": [{"path": str(part.path), "size": part.size, "mtime_ns": part.mtime_ns} for part in parts],
        "tensors": {name: {**entry, "file": file_of[tensor.name]} for name, (entry, tensor) in placed.stored.items()},
    }
    _write_json(directory / GGUF_INDEX, index)
    shapes = {name: values.shape for name, values in placed.small.items()}
    write_tensors(directory / "model.safetensors", shapes, lambda name: placed.small[name])


def _floats(part: _Part, tensor: GgufTensor) -> npt.NDArray[np.float32]:
    if tensor.dtype not in STORAGE:
        message = f"a vector of type {tensor.dtype} is not supported"
        raise ConversionRefused("unsupported_dtype", message, tensor.name)
    stored = part.data[tensor.begin : tensor.begin + stored_bytes(tensor.dtype, tensor.shape)]
    return to_float32(np.frombuffer(stored, STORAGE[tensor.dtype]).reshape(tensor.shape), tensor.dtype)


def _dtype(placed: BaseTensors) -> str:
    """The dtype of a model with quantised weights, as with other formats, or else the most frequent dtype."""
    if placed.types:
        return "bfloat16"
    dtypes = [str(entry["dtype"]) for entry, _ in placed.stored.values()]
    return _DTYPES[max(dtypes, key=dtypes.count)] if dtypes else "float32"


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
