from __future__ import annotations

import io
import lzma
import random
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import vllm_parts
from benchmarks.gpu.vllm_parts import LIBRARIES, is_needed, join, main, write_parts


def parts_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two files that cannot be compressed, in parts of up to 1,000 bytes."""
    monkeypatch.setattr(vllm_parts, "PART_BYTES", 1000)
    files = []
    for number in range(2):
        path = tmp_path / f"file{number}"
        path.write_bytes(random.Random(number).randbytes(1500))
        files.append((f"vllm/deep/file{number}", path))
    return write_parts(files, tmp_path / "parts")


def test_files_survive_their_division_into_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(tmp_path, monkeypatch)
    assert len(parts) > 2
    assert all(part.stat().st_size <= 1000 for part in parts)
    assert join(parts, tmp_path / "copy") == 2
    for number in range(2):
        copied = tmp_path / "copy" / "vllm" / "deep" / f"file{number}"
        assert copied.read_bytes() == (tmp_path / f"file{number}").read_bytes()


def test_new_parts_replace_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts_of(tmp_path, monkeypatch)
    assert [part.name for part in write_parts([], tmp_path / "parts")] == ["part-00.bin"]
    assert len(list((tmp_path / "parts").iterdir())) == 1


@pytest.mark.parametrize("lost", [0, 1, -1], ids=["first", "second", "last"])
def test_a_missing_part_is_refused(lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(tmp_path, monkeypatch)
    del parts[lost]
    with pytest.raises(ValueError, match=r"numbered from 0 without gaps|damaged or incomplete"):
        join(parts, tmp_path / "copy")


def test_a_damaged_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = parts_of(tmp_path, monkeypatch)[1]
    part.write_bytes(bytes(len(part.read_bytes())))
    assert main(["join", str(tmp_path / "parts"), str(tmp_path / "copy")]) == 2
    assert "the parts are damaged or incomplete" in capsys.readouterr().err


def test_an_archive_cannot_write_outside_its_folder_or_without_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = io.BytesIO()
    with lzma.open(packed, "wb") as compressed, tarfile.open(fileobj=compressed, mode="w|") as archive:
        member = tarfile.TarInfo("../outside")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"evil"))
    part = tmp_path / "part-00.bin"
    part.write_bytes(packed.getvalue())
    with pytest.raises(ValueError, match="damaged or incomplete"):
        join([part], tmp_path / "copy")
    assert not (tmp_path / "outside").exists()
    monkeypatch.setattr(vllm_parts, "MAX_BYTES", 3)
    with pytest.raises(ValueError, match="larger than 3 bytes"):
        join([part], tmp_path / "other")


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        *((path, True) for path in LIBRARIES),
        ("vllm/model_executor/models/llama.py", True),
        ("vllm/third_party/deep_gemm/__init__.py", True),
        ("vllm/third_party/deep_gemm/include/cute/arch/mma_sm90_gmma.hpp", False),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", False),
        ("vllm/_moe_C_stable_libtorch.abi3.so", False),
        ("vllm/vllm-rs", False),
    ],
)
def test_only_what_a_dense_llama_needs_is_packed(path: str, needed: bool) -> None:
    assert is_needed(path) is needed
