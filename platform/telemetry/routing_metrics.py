"""Figures for routers in front of several servers, under the names that vLLM gives them.

The Gateway API's inference extension and llm-d read these names to choose a server that has an adapter and room
(their model server protocol). Only adapters in the engine's pool are listed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily

from loramux.adapter_store.registry.digest_owners import DigestOwner, owners_of
from loramux.engine.protocol.messages import EngineReady, Stats
from loramux.migrations.database import Database
from loramux.platform.telemetry.engine_metrics import Collected

FRESH_S = 30.0
"""How long the names of a digest are used before they are read again, because a version can be added or purged."""

FindOwners = Callable[[Sequence[str]], Mapping[str, Sequence[DigestOwner]]]


class ResidentNames:
    """The names that requests can use for adapters in the engine. Blocking, and safe to use from several threads.

    `monotonic` is the clock, in seconds.
    """

    def __init__(self, find_owners: FindOwners, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._find_owners = find_owners
        self._monotonic = monotonic
        self._names: dict[str, tuple[str, ...]] = {}
        self._fresh_until_s = 0.0

    @classmethod
    def over(cls, database: Database) -> ResidentNames:
        return cls(lambda digests: owners_of(database, digests, None))

    def of(self, digests: Sequence[str]) -> list[str]:
        """Return the names of adapters: `tenant/adapter@version` for each version with a digest, and `tenant/adapter`
        for each adapter that has one.
        """
        now_s = self._monotonic()
        names = self._names
        if now_s >= self._fresh_until_s:
            names, self._fresh_until_s = {}, now_s + FRESH_S
        unknown = [digest for digest in digests if digest not in names]
        if unknown:
            owners = self._find_owners(unknown)
            names = names | {digest: tuple(_names(owners.get(digest, ()))) for digest in unknown}
        self._names = names
        return list(dict.fromkeys(name for digest in digests for name in names[digest]))


def render_routing(stats: Stats, info: EngineReady | None, served_name: str, names: Sequence[str]) -> bytes:
    """Return the text exposition. `names` are the adapters in the pool."""
    used = max(0, stats.num_pages - stats.num_reclaimable_pages)
    base = {"model_name": served_name}
    metrics = [
        _gauge("num_requests_running", "Sequences in the engine's steps", stats.num_running, base),
        _gauge("num_requests_waiting", "Sequences that wait", stats.num_waiting, base),
        _gauge(
            "kv_cache_usage_perc",
            "Share of the pool that cannot be evicted, from 0 to 1",
            used / stats.num_pages if stats.num_pages else 0.0,
            base,
        ),
        _gauge(
            "lora_requests_info",
            "The adapters in the pool, at the time that is the value",
            time.time(),
            {
                "max_lora": str(stats.num_slots),
                "running_lora_adapters": ",".join(names),
                "waiting_lora_adapters": "",
            },
        ),
    ]
    if info is not None:
        pages = {"block_size": str(info.page_tokens), "num_gpu_blocks": str(info.num_pages)}
        metrics.append(_gauge("cache_config_info", "The pool's pages", 1, pages))
    return generate_latest(Collected(metrics))


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def _names(owners: Sequence[DigestOwner]) -> Iterator[str]:
    for owner in owners:
        name = f"{owner.tenant_slug}/{owner.adapter_name}"
        yield name
        yield f"{name}@{owner.version}"
