"""Cuts an installed vLLM to what a dense Llama needs, in parts that are small enough to be copied to a card's machine.

    VENV/bin/python -m benchmarks.gpu.vllm_parts cut build/vllm      # writes build/vllm/part-00.bin, ...
    python -m benchmarks.gpu.vllm_parts join build/vllm build/peer   # on the card's machine
    python -m benchmarks.gpu.vllm_parts check build/peer             # imports the copy and nothing else

VENV is an environment outside this repository in which vLLM 0.24.0 and its requirements are installed, with the Python
version of the card's machine. `cut` imports MODULES there. It packs the files of every package that the imports load,
except torch and what torch requires, which the card's machine has. Of vLLM's compiled libraries, it packs only
LIBRARIES. Nothing of vLLM's is part of this repository, and `cut` prints the licence of each package.

`check` needs Python, torch and Triton of the versions that `cut` used. Without a GPU's driver, it loads an empty
replacement of `libcuda.so.1`, so it shows that the copy is complete, but runs no kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import io
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import distribution, packages_distributions
from pathlib import Path, PurePosixPath

PART_BYTES = 30 << 20
"""Largest part, in bytes. Beside this checkout, it fits into one call of `vllm_calls.py`."""

MAX_BYTES = 4 << 30
"""Largest unpacked copy, in bytes."""

PROVIDED = ("torch", "triton", "nvidia-", "cuda-", "sympy", "mpmath", "networkx")
"""Starts of the names of packages that the card's machine has: torch and what it requires."""

LIBRARIES = ("vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
"""vLLM's compiled libraries that a dense Llama needs: its operators, and FlashAttention 3."""

MODULES = (
    "vllm",
    "vllm.engine.arg_utils",
    "vllm.entrypoints.llm",
    "vllm.lora.request",
    "vllm.lora.worker_manager",
    "vllm.lora.punica_wrapper.punica_gpu",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
DRIVER = "libcuda.so.1"
DRIVER_FUNCTIONS = ("cuGetProcAddress_v2", "cuPointerGetAttribute", "cuTensorMapEncodeTiled")
"""Functions of the driver that the libraries name when they are loaded."""


def is_needed(path: str) -> bool:
    """True if a file of vLLM's is needed. `path` is relative to `site-packages`."""
    if path in LIBRARIES:
        return True
    # Sources and binaries of kernels that a dense Llama does not call.
    is_foreign = "/third_party/" in path and not path.endswith(".py")
    return not is_foreign and not path.endswith((".so", "/vllm-rs"))


def load_driver() -> bool:
    """Load the GPU's driver, or an empty replacement. Return whether the driver is real.

    Libraries that are loaded later find it by its name.
    """
    try:
        ctypes.CDLL(DRIVER, ctypes.RTLD_GLOBAL)
        return True
    except OSError:
        pass
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory) / "driver.c", Path(directory) / DRIVER
        source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in DRIVER_FUNCTIONS))
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    return False


def import_all() -> None:
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cuda")
    for name in MODULES:
        importlib.import_module(name)


def loaded_packages() -> list[str]:
    """The names of the packages whose modules are loaded, except those that the card's machine has."""
    owners = packages_distributions()
    tops = {name.partition(".")[0] for name in sys.modules}
    found = {owner for top in tops for owner in owners.get(top, ())}
    return sorted(name for name in found if not name.startswith(PROVIDED))


def files_of(package: str) -> Iterator[tuple[str, Path]]:
    """The files to pack: their paths in `site-packages`, and where they are now."""
    for file in distribution(package).files or ():
        name, path = PurePosixPath(file), Path(str(file.locate()))
        if ".." in name.parts or name.suffix == ".pyc" or not path.is_file():
            continue
        if package != "vllm" or is_needed(str(name)):
            yield str(name), path


def licence_of(package: str) -> str:
    """The licence that a package's metadata names."""
    found = distribution(package).metadata
    classifiers = [one for one in found.get_all("Classifier") or () if one.startswith("License :: ")]
    named = [*(found.get_all("License-Expression") or ()), ", ".join(one.rpartition(" :: ")[2] for one in classifiers)]
    named += [text.strip().partition("\n")[0][:60] for text in found.get_all("License") or ()]
    return next(filter(None, named), "not named")


def write_parts(files: Iterable[tuple[str, Path]], out: Path) -> list[Path]:
    """Write the files as one compressed archive, in parts of up to PART_BYTES. Return the parts."""
    packed = io.BytesIO()
    with lzma.open(packed, "wb", preset=2) as compressed, tarfile.open(fileobj=compressed, mode="w|") as archive:
        for name, path in files:
            archive.add(path, name, recursive=False)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("part-*.bin"):
        old.unlink()
    data, parts = packed.getbuffer(), []
    for number, begin in enumerate(range(0, len(data), PART_BYTES)):
        part = out / f"part-{number:02}.bin"
        part.write_bytes(data[begin : begin + PART_BYTES])
        parts.append(part)
    return parts


def join(parts: Sequence[Path], target: Path) -> int:
    """Unpack the parts into the folder `target`, which must not exist. Return the number of files.

    Raises ValueError if a part is missing or damaged, or if the files are larger than MAX_BYTES.
    """
    if [part.name for part in parts] != [f"part-{number:02}.bin" for number in range(len(parts))] or not parts:
        raise ValueError(f"the parts must be numbered from 0 without gaps, not {[part.name for part in parts]}")
    num_bytes, num_files = 0, 0
    packed = io.BytesIO(b"".join(part.read_bytes() for part in parts))
    target.mkdir(parents=True)
    try:
        with lzma.open(packed) as compressed, tarfile.open(fileobj=compressed, mode="r|") as archive:
            for member in archive:
                num_bytes, num_files = num_bytes + member.size, num_files + 1
                if num_bytes > MAX_BYTES:
                    raise ValueError(f"the files are larger than {MAX_BYTES} bytes")
                archive.extract(member, target, filter="data")
    except (lzma.LZMAError, EOFError, tarfile.TarError) as error:
        raise ValueError(f"the parts are damaged or incomplete: {error}") from error
    return num_files


def cut(out: Path) -> None:
    load_driver()
    import_all()
    packages = loaded_packages()
    parts = write_parts((one for package in packages for one in files_of(package)), out)
    for part in parts:
        print(f"{part}: {part.stat().st_size / 2**20:.1f} MiB")
    print(f"{len(packages)} packages in {len(parts)} parts; their licences, whose texts are in the parts:")
    by_licence: dict[str, list[str]] = {}
    for package in packages:
        by_licence.setdefault(licence_of(package), []).append(package)
    for licence, named in sorted(by_licence.items()):
        print(f"{licence}: {', '.join(named)}")


def check(folder: Path) -> None:
    """Import MODULES from the folder. Raises ImportError if something is missing."""
    is_real = load_driver()
    sys.path.insert(0, str(folder.resolve()))
    import_all()
    vllm = sys.modules["vllm"]
    assert vllm.__file__ is not None
    if not Path(vllm.__file__).is_relative_to(folder.resolve()):
        raise ImportError(f"vLLM was imported from {vllm.__file__} instead of {folder}")
    driver = "the GPU's driver" if is_real else f"an empty {DRIVER}"
    print(f"vLLM {vllm.__version__}: {len(MODULES)} modules imported with {driver}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.vllm_parts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cut", help="write the parts").add_argument("out", type=Path)
    joining = commands.add_parser("join", help="unpack the parts")
    joining.add_argument("parts", type=Path)
    joining.add_argument("target", type=Path)
    commands.add_parser("check", help="import the copy").add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "cut":
            cut(arguments.out)
        elif arguments.command == "join":
            print(f"{join(sorted(arguments.parts.glob('part-*.bin')), arguments.target)} files")
        else:
            check(arguments.folder)
    except (ImportError, OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"benchmarks.gpu.vllm_parts: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
