"""`/engine`: the engine's limits and counters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from typing_extensions import TypedDict

from loramux.admin.rest.access import PlatformReader, Services
from loramux.admin.rest.services import AdminServices
from loramux.engine.protocol.messages import Stats, StatsRequest
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.errors import NotFound, Unavailable
from loramux.platform.replicas.reports import UnknownReplica

router = APIRouter(prefix="/engine", tags=["engine"])

STATS_TIMEOUT_S = 5.0


class EngineDocument(TypedDict):
    """Limits, counters since the engine started, and counters of adapter loads into the pool (`loading`).

    `bandwidth_utilization` is the share of the GPU's memory bandwidth that decode steps have used. It is null if there
    were none, or if the engine runs on a CPU. `drafts` counts the drafted tokens that steps have verified,
    and the tokens that grammars have forced. `host_pages` describes the copies of evicted prefixes in host memory,
    and `disk_pages` those on disk.
    """

    object: Literal["engine"]
    device: str
    dtype: str
    quantization: str | None
    max_model_len: int
    page_tokens: int
    page_bytes: int
    num_pages: int
    num_free_pages: int
    num_kv_pages: int
    num_adapter_pages: int
    num_prefix_pages: int
    num_pinned_pages: int
    num_slots: int
    num_running: int
    num_waiting: int
    num_steps: int
    mixed_steps: int
    max_adapters_in_step: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    num_adapter_loads: int
    num_adapter_evictions: int
    num_preemptions: int
    bandwidth_utilization: float | None
    drafts: dict[str, Any]
    host_pages: dict[str, Any]
    disk_pages: dict[str, Any]
    loading: dict[str, Any]


@router.get("")
async def get_engine(
    services: Services,
    caller: PlatformReader,
    replica: Annotated[
        str | None,
        Query(max_length=40, description="The server or engine to query, by its identifier in `/replicas`."),
    ] = None,
) -> EngineDocument:
    """Get the engine's limits and counters. An engine restart resets the counters.

    For a server with several engines, the default is their sum, in which the counters of an engine that restarted stay.
    """
    stats = await engine_stats(services, replica=replica)
    info = services.engine.client.info
    if info is None:
        raise _silent()
    return {
        "object": "engine",
        "device": info.device,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "max_model_len": info.max_model_len,
        "page_tokens": info.page_tokens,
        "page_bytes": stats.page_bytes,
        "num_pages": stats.num_pages,
        "num_free_pages": stats.num_free_pages,
        "num_kv_pages": stats.num_kv_pages,
        "num_adapter_pages": stats.num_adapter_pages,
        "num_prefix_pages": stats.num_prefix_pages,
        "num_pinned_pages": stats.num_pinned_pages,
        "num_slots": stats.num_slots,
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "num_steps": stats.num_steps,
        "mixed_steps": stats.mixed_steps,
        "max_adapters_in_step": stats.max_adapters_in_step,
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "cached_tokens": stats.cached_tokens,
        "recomputed_tokens": stats.recomputed_tokens,
        "num_adapter_loads": stats.num_adapter_loads,
        "num_adapter_evictions": stats.num_adapter_evictions,
        "num_preemptions": stats.num_preemptions,
        "bandwidth_utilization": stats.decode_reads.utilization,
        "drafts": msgspec.to_builtins(stats.drafts),
        "host_pages": msgspec.to_builtins(stats.host_pages),
        "disk_pages": msgspec.to_builtins(stats.disk_pages),
        "loading": msgspec.to_builtins(stats.loading),
    }


async def engine_stats(services: AdminServices, with_tiers: bool = False, replica: str | None = None) -> Stats:
    """Return the statistics of this server's engines, or of one engine, that of the server `replica` or of this name.

    Raises NotFound if there is no such server or engine, and Unavailable if the engine does not answer.
    """
    try:
        if replica is None:
            return await services.engine.client.call(StatsRequest(with_tiers=with_tiers), STATS_TIMEOUT_S)
        if services.engine.fleet is None:
            raise UnknownReplica(replica)
        return await services.engine.fleet.stats_of(replica, STATS_TIMEOUT_S, with_tiers)
    except UnknownReplica:
        raise NotFound("there is no such server or engine", param="replica") from None
    except (EngineUnavailable, TimeoutError):
        raise _silent() from None


def _silent() -> Unavailable:
    return Unavailable("the engine does not answer", code="engine_unavailable", retry_after_s=1.0)
