from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import harness, hot_load
from benchmarks.answers import CheckError
from benchmarks.hot_load import WAYS, Bench, main
from benchmarks.hot_load_files import HotFiles, target_of
from benchmarks.random_model import SHAPES


@pytest.fixture(autouse=True)
def _no_look_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "require_idle", lambda is_allowed: 0.5)
    monkeypatch.setattr(harness, "busy_share", lambda: 0.5)
    monkeypatch.setattr(hot_load.sys, "setswitchinterval", lambda seconds: None)


def run(tmp_path: Path, *arguments: str) -> int:
    tiny = ["--model", "small", "--ranks", "2,3", "--megabytes", "1", "--rounds", "2", "--loaders", "2"]
    return main([*tiny, "--scratch", str(tmp_path / "scratch"), *arguments])


@pytest.mark.campaign
def test_run_compares_every_byte_and_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "hot_load.json"
    assert run(tmp_path, "--out", str(out)) == 0
    document = json.loads(out.read_text())
    assert document.keys() == {"date", "machine", "busy_share", "workload", "check", "cases"}
    assert document["check"] == {"bytes_compared": document["check"]["bytes_compared"], "damaged_files_refused": 4}
    assert [(case["rank"], case["page_cache"]) for case in document["cases"]] == [
        (2, "warm"),
        (2, "cold"),
        (3, "warm"),
        (3, "cold"),
    ]
    sizes = [3 * case["files"] * case["file_MB"] * 1e6 for case in document["cases"] if case["page_cache"] == "warm"]
    assert document["check"]["bytes_compared"] == pytest.approx(sum(sizes), rel=0.01)
    for case in document["cases"]:
        assert tuple(case["ways"]) == WAYS
        assert case["ways"]["plain"]["over_plain_rounds"] == [1.0, 1.0]
        assert all(way["MB_s"] > 0 and len(way["over_plain_rounds"]) == 2 for way in case["ways"].values())
        assert {"disk read", "disk verify", "pool copy"} <= case["stage_s_per_GB"].keys()
        assert case["meets_target"] == (case["ways"]["pool"]["over_plain"] >= 0.8)
    assert "relative to a plain read" in capsys.readouterr().out


def test_wrong_bytes_in_the_pool_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Bench.pool

    def wrong(bench: Bench) -> None:
        copy(bench)
        bench.views.raw[1, 0, 0] ^= 1

    monkeypatch.setattr(Bench, "pool", wrong)
    assert run(tmp_path) == 1
    assert "nothing was measured" in capsys.readouterr().out


def test_missing_adapter_file_raises_check_error(tmp_path: Path) -> None:
    files = HotFiles(target_of(SHAPES["small"]), 2, 2, tmp_path)
    files.make()
    with closing(Bench(files, 2)) as bench:
        files.path(files.digests[0]).unlink()
        with pytest.raises(CheckError, match="could not be loaded"):
            bench.pool()
