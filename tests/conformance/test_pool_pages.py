from __future__ import annotations

from pathlib import Path

from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.assembly import assemble_engine
from loramux.engine.loop.config import EngineConfig, pack_target
from loramux.engine.protocol.messages import StatsRequest
from tests.conformance.parity import load
from tests.conformance.tiny_models import (
    ALL_LINEARS,
    PLANS,
    AdapterPlan,
    add_adapters,
    make_base,
    pack_peft_directory,
)


def test_sixteen_adapters_take_their_packed_pages_and_no_more(tmp_path: Path) -> None:
    plans = [*PLANS, *(AdapterPlan(f"more{rank}", rank, ALL_LINEARS) for rank in (2, 5, 7, 12, 24, 32, 48, 63))]
    add_adapters(make_base("llama", tmp_path / "base"), plans, tmp_path / "adapters")
    target = pack_target(ModelConfig.load(tmp_path / "base"), "float32")
    packed = [pack_peft_directory(tmp_path / "adapters" / plan.name, target, tmp_path / "base") for plan in plans]
    config = EngineConfig(
        model_dir=str(tmp_path / "base"), blob_url="", cache_dir="", dtype="float32", pool_bytes=64 << 20, num_threads=1
    )
    assembled = assemble_engine(config, lambda: None, MemoryStager({one.digest: one for one in packed}))
    load(assembled.engine, [one.digest for one in packed])
    stats = assembled.engine.stats(StatsRequest(call_id=""))
    assert len(stats.adapters) == 16
    assert stats.num_adapter_pages == sum(len(one.payload) for one in packed)
    assembled.adapters.close()
