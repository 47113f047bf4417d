from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu import vllm_calls, vllm_parts
from benchmarks.gpu.vllm_calls import FolderMachine, calls_of, main
from benchmarks.gpu.vllm_parts import write_parts

ROOT = Path(__file__).parents[3]
OWN = "benchmarks/gpu/vllm_parts.py"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout with one file of this repository, and with three parts that git ignores."""
    root = tmp_path / "checkout"
    (root / OWN).parent.mkdir(parents=True)
    shutil.copy(ROOT / OWN, root / OWN)
    (root / ".gitignore").write_text("/build/\n")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    monkeypatch.setattr(vllm_parts, "PART_BYTES", 1000)
    file = tmp_path / "file"
    file.write_bytes(random.Random(0).randbytes(2500))
    write_parts([("vllm/file", file)], root / "build" / "vllm")
    return root


def parts_of(root: Path) -> list[str]:
    return [str(part.relative_to(root)) for part in sorted((root / "build").rglob("part-*.bin"))]


def test_parts_arrive_in_one_call_each_and_are_joined_by_the_last(checkout: Path, tmp_path: Path) -> None:
    machine = FolderMachine(checkout, tmp_path / "machine")
    parts = parts_of(checkout)
    calls = calls_of(parts, "echo measured", machine.stage)
    assert [call.brings for call in calls] == [*((part,) for part in parts), ()]
    said = [machine.run(call) for call in calls]
    assert said[-1].endswith("1 files\nmeasured")
    assert (Path(machine.stage) / "peer" / "vllm" / "file").read_bytes() == (tmp_path / "file").read_bytes()
    # The machine can run the last call again.
    assert machine.run(calls[-1]).endswith("measured")


def test_a_call_that_is_too_large_is_refused(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = sum(path.stat().st_size for path in (checkout / OWN, checkout / ".gitignore"))
    monkeypatch.setattr(vllm_calls, "CALL_BYTES", tree + 999)
    machine = FolderMachine(checkout, tmp_path / "machine")
    whole, *_, last = calls_of(parts_of(checkout), "true", machine.stage)
    with pytest.raises(ValueError, match="cut smaller parts"):
        machine.run(whole)
    with pytest.raises(ValueError, match=r"a call ended with 2: .* numbered from 0 without gaps"):
        machine.run(last)


def test_a_machine_that_was_given_back_misses_the_earlier_parts(checkout: Path, tmp_path: Path) -> None:
    first, second = (FolderMachine(checkout, tmp_path / name) for name in ("first", "second"))
    for call in calls_of(parts_of(checkout), "true", first.stage)[:2]:
        first.run(call)
    *_, third, last = calls_of(parts_of(checkout), "true", second.stage)
    second.run(third)
    with pytest.raises(ValueError, match="numbered from 0 without gaps"):
        second.run(last)


def test_the_calls_are_listed(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_calls, "ROOT", checkout)
    assert main(["list", str(checkout / "build" / "vllm"), "--run", "python measure"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "build/vllm/part-00.bin: mkdir -p /tmp/vllm/parts && mv build/vllm/part-00.bin /tmp/vllm/parts/"
    assert lines[-1].endswith("&& python measure")
    assert main(["list", str(checkout)]) == 2
    assert "has no parts" in capsys.readouterr().err
