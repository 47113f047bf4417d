"""Mutates valid files and answers, and reads them: `python -m tests.reliability.fuzzing [--runs N] [READER ...]`.

A reader may return or raise the errors that it documents. Any other error is a crash. A case may take one second of
processor time, a minute in all, and 256 MB of address space. The seed determines all cases. A case that fails is
written to `--out`.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from loramux.adapter_store.errors import StoreError
from loramux.adapter_store.formats.files.tensor_file import TensorFile
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.packed_file import write_packed
from loramux.adapter_store.formats.packed.packing import pack
from loramux.adapter_store.formats.version_files.added_vocabulary import (
    AddedToken,
    AddedVocabulary,
    encode_added_vocabulary,
    parse_added_vocabulary,
)
from loramux.adapter_store.formats.version_files.answer_parsers import parse_answer_parsers
from loramux.adapter_store.gguf.gguf_file import GgufFile
from loramux.adapter_store.validation.peft_config import parse_peft_config
from loramux.adapter_store.validation.validation import validate_files
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.protocol.errors import EngineError
from loramux.platform.tool_calls.parsers import PARSERS
from tests.adapter_store.adapter_files import AdapterMaker
from tests.adapter_store.gguf.llama_cpp import write_gguf
from tests.adapter_store.packed_files import read_packed
from tests.adapter_store.small_base import make_target
from tests.demo_base import DEMO_BASE
from tests.platform.tool_calls.recorded import RECORDED
from tests.reliability.record import recorded

LIMIT_S = 1.0
WAIT_LIMIT_S = 60.0
"""Longest time of a case in all, for one that waits. LIMIT_S is processor time, so that other programs do not count."""

LIMIT_BYTES = 256 << 20
LARGEST_BYTES = 1 << 20
"""Longest case. Mutations repeat parts of a case."""
EXPECTED = (StoreError, EngineError)
"""The errors with which readers refuse an input."""

Read = Callable[[bytes], object]
ODD = (
    *(b"\0", b"\xff", b"{", b"}", b"[", b"]", b'"', b"\\", b"\\ud800", b",", b":", b"null", b"true", b"-1", b"NaN"),
    *(b"1e999", b"0.5", b"9" * 400, b"\xf0\x9f\x98\x80", b"[" * 2000, b'{"a":' * 500, b"__metadata__", b"\n", b" "),
    *((1 << bits).to_bytes(8, "little") for bits in (0, 7, 16, 31, 32, 48, 63)),
    b"\xff" * 8,
)
"""Bytes that replace or extend a part of a case."""


class TookTooLong(BaseException):
    """A case ran for more than LIMIT_S or WAIT_LIMIT_S. Not an Exception, so that no reader catches it."""


@dataclass(frozen=True, slots=True)
class Reader:
    read: Read
    seeds: tuple[bytes, ...]
    """Valid inputs."""
    finish: Callable[[bytes], bytes] = bytes
    """Repairs a mutated input, for example its checksums, so that more of the reader runs."""


def open_readers(directory: Path) -> Mapping[str, Reader]:
    """The readers by name. Those that read a path read files in `directory`."""
    target, path = make_target(), directory / "case"
    files = [AdapterMaker(target)(seed=seed, rank=rank) for seed, rank in ((0, 1), (1, 4))]
    for number, one in enumerate(files):
        report = validate_files(one.config_bytes, one.tensor_bytes, target)
        write_canonical(one.tensor_bytes, report.scales, directory / f"canonical-{number}")
        write_packed(directory / f"packed-{number}", pack(directory / f"canonical-{number}", target), target)
    token = AddedToken(
        id=70, content="<new>", special=True, lstrip=False, rstrip=False, single_word=False, normalized=False
    )
    vocabulary = AddedVocabulary(vocab_size=71, tokens=(token,))
    prefix = "base_model.model.model.layers.0.self_attn.v_proj"
    tensors = {f"{prefix}.lora_A.weight": torch.randn(3, 8), f"{prefix}.lora_B.weight": torch.randn(4, 3)}
    write_gguf(directory / "adapter.gguf", tensors, alpha=8.0, metadata={"general.tags": ["one", "two"]})

    def read_tensors(content: bytes) -> None:
        with TensorFile(content) as file:
            for name in file.header.tensors:
                file.float32(name)

    def read_gguf(content: bytes) -> None:
        path.write_bytes(content)
        with GgufFile(path) as file:
            for name in file.tensors:
                file.float32(name)

    def read_pack(content: bytes) -> None:
        path.write_bytes(content)
        read_packed(path)

    def read_model_config(content: bytes) -> None:
        (directory / "config.json").write_bytes(content)
        ModelConfig.load(directory)

    readers = {
        "safetensors": Reader(read_tensors, tuple(one.tensor_bytes for one in files)),
        "gguf": Reader(read_gguf, ((directory / "adapter.gguf").read_bytes(),)),
        "packed": Reader(
            read_pack, tuple((directory / f"packed-{number}").read_bytes() for number in range(2)), with_header_checksum
        ),
        "peft-config": Reader(parse_peft_config, tuple(one.config_bytes for one in files)),
        "model-config": Reader(read_model_config, ((DEMO_BASE / "config.json").read_bytes(),)),
        "answer-parsers": Reader(parse_answer_parsers, (b'{"tool_call_parser": "hermes"}',)),
        "added-vocabulary": Reader(parse_added_vocabulary, (encode_added_vocabulary(vocabulary),)),
    }
    for name in PARSERS:
        seeds = tuple(one.answer.encode() for one in RECORDED.values() if one.format_name == name)
        readers[f"tool calls: {name}"] = Reader(_reader_of_calls(name), seeds)
    return readers


def with_header_checksum(packed: bytes) -> bytes:
    """A packed file whose header's checksum fits, as far as the file has a whole header."""
    length = int.from_bytes(packed[8:12], "little")
    header = packed[44 : 44 + length]
    return packed[:12] + hashlib.sha256(header).digest() + packed[44:] if len(header) == length else packed


def _reader_of_calls(name: str) -> Read:
    def read(content: bytes) -> None:
        parser = PARSERS[name]()
        text = content.decode(errors="replace")
        # Pieces of different lengths, which depend only on the case.
        size = 1 + len(text) % 7
        for begin in range(0, len(text), size):
            parser.feed(text[begin : begin + size])
        parser.finish()

    return read


def mutated(seeds: Sequence[bytes], dice: random.Random) -> bytes:
    case = bytearray(dice.choice(seeds))
    for _ in range(dice.choice((1, 1, 2, 3, 8))):
        at = dice.randrange(len(case) + 1)
        end = min(len(case), at + dice.choice((0, 1, 1, 2, 8, 64)))
        match dice.randrange(6):
            case 0 if at < len(case):
                case[at] ^= 1 << dice.randrange(8)
            case 1:
                case[at:end] = dice.choice(ODD)
            case 2:
                case[at:end] = b""
            case 3:
                case[at:at] = case[at:end] * dice.choice((1, 2, 50))
            case 4:
                other = dice.choice(seeds)
                begin = dice.randrange(len(other) + 1)
                case[at:end] = other[begin : begin + dice.choice((1, 8, 64, 512))]
            case _ if dice.random() < 0.2:
                del case[at:]
    return bytes(case[:LARGEST_BYTES])


@contextmanager
def limits(limit_s: float, limit_bytes: int | None) -> Iterator[None]:
    """Raise TookTooLong after `limit_s` seconds of processor time or WAIT_LIMIT_S. Allow this much more address space
    than is in use, unless it is None.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise TookTooLong

    before = {number: signal.signal(number, end) for number in (signal.SIGPROF, signal.SIGALRM)}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limit_bytes, hard))
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    signal.setitimer(signal.ITIMER_REAL, WAIT_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def verdict(read: Read, case: bytes, limit_s: float = LIMIT_S, limit_bytes: int | None = LIMIT_BYTES) -> str | None:
    """Read a case. Return `crashes`, `slow` or `large`, or None if the reader kept its promise."""
    try:
        with limits(limit_s, limit_bytes):
            read(case)
    except EXPECTED:
        return None
    except TookTooLong:
        return "slow"
    except MemoryError:
        return "large"
    except Exception:
        return "crashes"
    return None


def fuzz(
    reader: Reader,
    num_runs: int,
    seed: str,
    keep: Callable[[str, bytes], None],
    limit_bytes: int | None = LIMIT_BYTES,
) -> Counter[str]:
    """Read `num_runs` mutated inputs. Call `keep` with the verdict and the input of each that failed."""
    dice = random.Random(seed)
    found: Counter[str] = Counter()
    for _ in range(num_runs):
        case = reader.finish(mutated(reader.seeds, dice))
        found["executions"] += 1
        if (failed := verdict(reader.read, case, limit_bytes=limit_bytes)) is not None:
            found[failed] += 1
            keep(failed, case)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.fuzzing", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="READER", help="readers by name; all by default")
    parser.add_argument("--runs", type=int, default=10_000, help="cases for each reader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "loramux-fuzzing")
    arguments = parser.parse_args(argv)
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        readers = open_readers(Path(directory))
        for name in arguments.only or readers:
            if name not in readers:
                parser.error(f"there is no reader {name!r}; there are: {', '.join(readers)}")

            def keep(failed: str, case: bytes, name: str = name) -> None:
                folder = arguments.out / name.replace(": ", "-") / failed
                folder.mkdir(parents=True, exist_ok=True)
                (folder / hashlib.sha256(case).hexdigest()[:16]).write_bytes(case)

            started_s = time.monotonic()
            with recorded("readers", seed=arguments.seed) as figures:
                found = fuzz(readers[name], arguments.runs, f"{arguments.seed} {name}", keep)
                figures |= {what: found[what] for what in ("executions", "crashes", "slow", "large")}
            print(f"{name}: {dict(found)}, {time.monotonic() - started_s:.0f} s", flush=True)
            total += found
    failed = total.total() - total["executions"]
    if failed:
        print(f"the cases that failed are in {arguments.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
