from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.sandbox.confinement import REQUIRED
from loramux.adapter_store.tiers.host_tier import HostTier
from loramux.adapter_store.tiers.staging_client import StagingClient
from loramux.adapter_store.tiers.staging_link import StagingLink
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.loop import assembly
from loramux.engine.loop.assembly import SPARE_BYTES, _grammars, assemble_engine, open_stager, start_stager
from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.errors import ConfigNotUsable
from loramux.kernels.layout import LinearShape, PageGeometry


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model_dir="", blob_url="", cache_dir="", **settings)


def test_max_batch_tokens_below_max_sequences_is_refused() -> None:
    assert config(max_batch_tokens=16, max_sequences=16).max_sequences == 16
    with pytest.raises(ConfigNotUsable, match=r"max_batch_tokens \(15\) is less than max_sequences \(16\)"):
        config(max_batch_tokens=15, max_sequences=16)


def test_engine_process_checks_its_config() -> None:
    document = msgspec.json.encode(config()).replace(b'"max_sequences":64', b'"max_sequences":4096')
    with pytest.raises(ConfigNotUsable, match="4096"):
        msgspec.json.decode(document, type=EngineConfig)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan"), float("inf")])
def test_invalid_max_pinned_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigNotUsable, match="max_pinned_share"):
        config(max_pinned_share=share)


def test_unwritable_disk_tier_is_refused_without_its_path(target: PackTarget, tmp_path: Path) -> None:
    place = tmp_path / "secret-name"
    place.write_text("a file where a directory should be")
    settings = EngineConfig(model_dir="", blob_url=f"file://{tmp_path / 'blobs'}", cache_dir=str(place))
    starting = closing(start_stager(settings, target, HostTier(0), lambda: None))
    with starting as stager, pytest.raises(ConfigNotUsable, match="choose another disk_tier_dir") as refused:
        open_stager(stager, HostAccelerator())
    assert "secret-name" not in str(refused.value)


def test_host_tier_memory_is_pinned(target: PackTarget, tmp_path: Path) -> None:
    settings = EngineConfig(
        model_dir="", blob_url=f"file://{tmp_path / 'blobs'}", cache_dir=str(tmp_path / "disk"), host_tier_bytes=1 << 20
    )
    pinned = []

    class Watched(HostAccelerator):
        def pin(self, memory: torch.Tensor) -> None:
            pinned.append(memory)

    with closing(start_stager(settings, target, HostTier(1 << 20), lambda: None)) as stager:
        open_stager(stager, Watched())
    (memory,) = pinned
    assert memory.numel() == 1 << 20
    assert stager.max_bytes == SPARE_BYTES


def test_staging_process_starts_before_the_model_is_loaded_and_opens_no_tier_if_it_cannot_be(
    demo_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[StagingClient] = []
    sent: list[object] = []
    start = assembly.start_stager

    def started_stager(*arguments: Any) -> StagingClient:
        started.append(start(*arguments))
        return started[-1]

    def load(*arguments: Any) -> None:
        assert started[0].pid is not None
        assert sent == []
        raise ConfigNotUsable("no model")

    monkeypatch.setattr(StagingLink, "send", lambda _, message: sent.append(message))
    monkeypatch.setattr(assembly, "start_stager", started_stager)
    monkeypatch.setattr(assembly, "_backend", lambda *_: SimpleNamespace(accelerator=HostAccelerator()))
    monkeypatch.setattr(assembly, "load_base", load)
    settings = EngineConfig(
        model_dir=str(demo_base), blob_url=f"file://{tmp_path / 'blobs'}", cache_dir=str(tmp_path), device="cpu"
    )
    with pytest.raises(ConfigNotUsable, match="no model"):
        assemble_engine(settings, lambda: None)
    assert [stager.pid for stager in started] == [None]


@pytest.mark.parametrize("is_required", [True, False])
def test_grammar_process_is_told_that_the_sandbox_is_required(demo_base: Path, is_required: bool) -> None:
    settings = EngineConfig(model_dir=str(demo_base), blob_url="", cache_dir="", is_sandbox_required=is_required)
    with closing(_grammars(settings, ModelConfig.load(demo_base))) as grammars:
        assert (REQUIRED in grammars._command) is is_required


@pytest.fixture
def target() -> PackTarget:
    return PackTarget((LinearShape("q_proj", 32, 32),), PageGeometry(2, 2, 8, 4, 4), "float32")
