"""The push benchmark on a tiny model, and with an engine that keys cached pages by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.serving import push

pytestmark = pytest.mark.campaign

SMALL = (
    "--shape tiny --rank 8 --dtype float32 --adapters 1 --pushes 4 --rounds 2 --every 0.5 --streams 1 --answer 8 "
    "--warm 0.2 --saturating 2 --allow-busy"
)

MUTANT = """
from loramux.engine.pages.prefix_cache import PrefixCache

by_digest = PrefixCache.page_key


def by_name(self, parent, digest, tokens, num_base_tokens=0):
    return by_digest(self, parent, None if digest is None else "the adapter's name", tokens, num_base_tokens)


PrefixCache.page_key = by_name
"""


def test_a_small_run_has_the_time_of_every_stage(tmp_path: Path) -> None:
    out = tmp_path / "push.json"
    assert push.main([*SMALL.split(), "--out", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["stages_ms"].keys() == set(push.STAGES)
    assert figures["pushes"] == 4
    # One before and one after each of four pushes, as many in the quiet rounds, one after the adapter's first push, and
    # one at the end.
    assert figures["answers"] >= 18
    assert figures["largest_difference_from_peft"] < 1e-3


def test_pages_keyed_by_name_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Python runs this file in every process of the server.
    (tmp_path / "sitecustomize.py").write_text(MUTANT)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert push.main(SMALL.split()) == 1
    assert "answers with a log-probability that is" in capsys.readouterr().out
