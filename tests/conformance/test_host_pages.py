"""With evicted pages in host memory and on disk, a small pool gives the answers and the bills of a large one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.assembly import AssembledEngine
from loramux.engine.pages import host_pages, state_checkpoints
from loramux.engine.pages.disk_file import DiskFile
from loramux.engine.pages.disk_pages import Transfer
from loramux.engine.pages.host_pages import HostPages
from loramux.engine.protocol.messages import (
    Add,
    DiskPageCounts,
    Finished,
    HostPageCounts,
    SamplingParams,
    StatsRequest,
    StepOutput,
    TokenLogprobs,
)
from tests.conformance.parity import make_subject
from tests.conformance.test_gpu_engine import gpu_path
from tests.conformance.tiny_models import SMALL_SHAPE, VOCAB_SIZE, AdapterPlan

WINDOW = 24
NUM_TURNS = 3
NUM_MESSAGE, NUM_ANSWER = 45, 9
SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True, num_logprobs=1)
PLANS = [AdapterPlan("r2", 2, ["q_proj", "v_proj"])]

Bill = tuple[int, int, int]


@pytest.fixture(autouse=True)
def fast_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are restored whatever copies, transfers and steps take on this machine."""
    monkeypatch.setattr(HostPages, "note_computed", lambda *_: None)
    monkeypatch.setattr(host_pages, "FIRST_WAIT_S", 600.0)
    start = DiskFile.start

    def start_and_wait(self: DiskFile, transfer: Transfer) -> None:
        start(self, transfer)
        while all(transfer is not ended for ended, _ in self._ended):
            time.sleep(0.0001)

    # Otherwise, it would depend on the disk which pages are lost because host memory needs their slots.
    monkeypatch.setattr(DiskFile, "start", start_and_wait)


class Conversations:
    """Three tenants take turns. The second uses the adapter, if there is one."""

    def __init__(self, assembled: AssembledEngine, digest: str | None) -> None:
        self._assembled = assembled
        self._digest = digest
        self._disk = assembled.disk
        self.tokens: list[tuple[int, ...]] = []
        self.logprobs: list[list[TokenLogprobs]] = []
        self.bills: list[Bill] = []

    def run(self) -> tuple[HostPageCounts, DiskPageCounts]:
        generator = torch.Generator().manual_seed(3)
        contexts: list[tuple[int, ...]] = [()] * 3
        for turn in range(NUM_TURNS):
            for tenant in range(3):
                message = torch.randint(3, VOCAB_SIZE, (NUM_MESSAGE,), generator=generator).tolist()
                contexts[tenant] += tuple(message)
                contexts[tenant] += self._answer(f"{turn} of {tenant}", tenant, contexts[tenant])
                if self._disk.is_on:
                    self._evict_to_disk()
        engine = self._assembled.engine
        engine.check_integrity()
        engine._prefixes.host.check_integrity()
        stats = engine.stats(StatsRequest(call_id=""))
        self._assembled.adapters.close()
        self._assembled.disk.close()
        return stats.host_pages, stats.disk_pages

    def _evict_to_disk(self) -> None:
        """Evict all pages from the pool and from host memory."""
        host, reclaimer = self._assembled.engine._prefixes.host, self._assembled.adapters.reclaimer
        while reclaimer.policy.num_pages:
            reclaimer.evict_one(0)
        while host._evict_for(b"", to_disk=True):
            host.poll()
        assert len(host) == 0

    def _answer(self, name: str, tenant: int, prompt: tuple[int, ...]) -> tuple[int, ...]:
        engine = self._assembled.engine
        add = Add(
            sequence_id=name,
            prompt=prompt,
            max_tokens=NUM_ANSWER,
            sampling=SAMPLING,
            digest=self._digest if tenant == 1 else None,
            isolation_key=b"tenant %d" % tenant,
        )
        engine.add(b"", add)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        while engine.has_work:
            engine.step()
            for outbound in engine.take_outbox():
                match outbound.message:
                    case StepOutput(outputs=outputs):
                        for output in outputs:
                            tokens += output.token_ids
                            logprobs += output.logprobs
                    case Finished() as ended:
                        assert ended.reason == "length"
                        self.bills.append((ended.prompt_tokens, ended.completion_tokens, ended.cached_tokens))
        self.tokens.append(tuple(tokens))
        self.logprobs.append(logprobs)
        return tuple(tokens)


@pytest.mark.parametrize(
    ("family", "settings", "num_spare"),
    [
        pytest.param("llama", {}, 20, id="llama"),
        pytest.param("llama", {"kv_dtype": "int8"}, 20, id="llama-int8", marks=pytest.mark.campaign),
        pytest.param("gemma3", {}, 20, id="windows"),
        pytest.param("qwen3_5", {}, 8, id="states", marks=pytest.mark.campaign),
    ],
)
def test_a_small_pool_with_host_memory_equals_a_large_pool(
    family: str, settings: dict[str, Any], num_spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short prompts leave checkpoints, too.
    monkeypatch.setattr(state_checkpoints, "MIN_PAGES", 1)
    subject = make_subject(family, tmp_path, PLANS, SMALL_SHAPE, WINDOW)
    model = ModelConfig.load(subject.directory)
    geometry = model.geometry(1 if settings else 4, 4)
    page_bytes = geometry.pool_page_bytes
    # Room for the adapter, two states, and `num_spare` pages, little more than the longest conversation takes.
    num_pages = max(subject.num_pages.values()) + 2 * model.num_state_pages(geometry) + num_spare
    small, host = num_pages * page_bytes, 400 * page_bytes
    ways: dict[str, dict[str, Any]] = {
        "large": {"pool_bytes": 400 * page_bytes},
        "small": {"pool_bytes": small},
        "host": {"pool_bytes": small, "kv_host_bytes": host},
        "disk": {"pool_bytes": small, "kv_host_bytes": host, "kv_disk_bytes": host, "cache_dir": str(tmp_path)},
    }
    found: dict[str, Conversations] = {}
    for way, sizes in ways.items():
        # The subject's adapters are packed for K and V in float32.
        digest = None if settings else subject.digests["r2"]
        found[way] = Conversations(subject.assemble(**settings, **sizes), digest)
        in_host, on_disk = found[way].run()
        assert (in_host.restored_tokens > 0) == (way in ("host", "disk"))
        assert on_disk.read_tokens == (in_host.restored_tokens if way == "disk" else 0)
    assert found["host"].tokens == found["large"].tokens == found["small"].tokens
    # Restored pages are the same bits, so everything computed from them is, too.
    for way in ("host", "disk"):
        assert found[way].logprobs == found["large"].logprobs
        assert found[way].bills == found["large"].bills
    assert sum(cached for *_, cached in found["small"].bills) < sum(cached for *_, cached in found["host"].bills)


def test_an_engine_that_prepares_steps_ahead_restores_the_same_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph executor submits a step while the one before it runs. Copies are submitted in between."""
    subject = make_subject("llama", tmp_path, PLANS, SMALL_SHAPE, WINDOW)
    page_bytes = ModelConfig.load(subject.directory).geometry(4, 4).pool_page_bytes
    found = []
    for sizes in ({"pool_bytes": 400 * page_bytes}, {"pool_bytes": 22 * page_bytes, "kv_host_bytes": 400 * page_bytes}):
        assembled = subject.assemble(gpu_path("gpu without kernels", monkeypatch), **sizes)
        conversations = Conversations(assembled, subject.digests["r2"])
        found.append((conversations.run()[0].restored_tokens > 0, conversations.tokens, conversations.bills))
    assert found[0][1:] == found[1][1:]
    assert [is_restored for is_restored, *_ in found] == [False, True]
