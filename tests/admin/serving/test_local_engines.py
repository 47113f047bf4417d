from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from loramux.admin.doctor import memory_plan
from loramux.admin.doctor.memory_plan import MemoryPlan
from loramux.admin.errors import StartRefused
from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.settings import Settings, SettingsError, load_settings
from loramux.admin.serving import engine_plans
from loramux.admin.serving.engine_plans import plan_engines
from loramux.admin.serving.local_engines import LocalEngines
from loramux.admin.serving.serve import read_model
from loramux.engine.loop import config as engine_config
from loramux.engine.loop.config import EngineConfig
from loramux.migrations.database import Database
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.local_engine import EngineStartError, Supervision
from loramux.platform.ledger.events import Ledger
from loramux.platform.replicas import data_parallel
from tests.admin.serving.test_gateway import ADMIN_KEY, start, words
from tests.conformance.gateway_lab import children_of
from tests.conformance.tiny_models import SMALL_SHAPE
from tests.platform.engine_link import toy_engine
from tests.quantized_layouts import LAYOUTS, quantize_directory

SMALL = {"pool_bytes": 16 << 20, "host_tier_bytes": 0, "device": "cpu"}


def settings_of(model: Path, **more: Any) -> Settings:
    return load_settings(Settings, {"model": model, **SMALL, **more})


def plan(model: Path, **more: Any) -> Sequence[EngineConfig]:
    settings = settings_of(model, **more)
    return plan_engines(settings, read_model(settings)[1])


@pytest.mark.parametrize(
    ("settings", "speculate"),
    [
        ({"device": "cpu"}, "text"),
        ({"device": "cuda"}, "off"),
        ({"device": "cpu", "speculate": "off"}, "off"),
        ({"device": "cuda", "speculate": "text"}, "text"),
    ],
    ids=["cpu", "gpu", "off", "text"],
)
def test_drafts_come_from_the_text_on_a_cpu_by_default(
    demo_base: Path, settings: dict[str, Any], speculate: str
) -> None:
    assert read_model(settings_of(demo_base, **settings), runs_here=False)[1].speculate == speculate


def plan_on_gpus(model: Path, **more: Any) -> Sequence[EngineConfig]:
    same = {name: more[name] for name in ("num_threads", "tensor_parallel_size") if name in more}
    config = EngineConfig(model_dir=str(model), blob_url="", cache_dir="", device="cuda", **{"num_threads": 8, **same})
    return plan_engines(settings_of(model, **{**more, "device": "cuda"}), config)


def test_engines_on_a_cpu_divide_the_threads(demo_base: Path) -> None:
    [alone] = plan(demo_base, num_threads=5)
    assert (alone.num_threads, alone.gpus) == (5, ())
    both = plan(demo_base, num_threads=5, data_parallel_size=2)
    assert [(one.num_threads, one.pool_bytes) for one in both] == [(2, 16 << 20)] * 2


def test_workers_are_planned_only_for_a_base_that_they_can_share(demo_base: Path) -> None:
    assert [one.tensor_parallel_size for one in plan(demo_base, num_threads=2)] == [1]
    settings = {"num_threads": 4, "tensor_parallel_size": 4}
    for quantization in (None, "int8"):
        assert [one.tensor_parallel_size for one in plan(demo_base, **settings, quantization=quantization)] == [4]
    with pytest.raises(StartRefused, match="4 workers need a thread each, but num_threads is 2"):
        plan(demo_base, **{**settings, "num_threads": 2})
    with pytest.raises(StartRefused, match="several workers cannot keep keys and values in host memory so far"):
        plan(demo_base, **settings, kv_host_bytes=1 << 20)
    both = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    assert [one.num_threads for one in plan(demo_base, **both, num_threads=4)] == [2, 2]
    said = "the 2 workers of each of 2 engines need a thread each, but num_threads is 3: lower data_parallel_size"
    with pytest.raises(StartRefused, match=said):
        plan(demo_base, **both, num_threads=3)


@pytest.mark.parametrize("layout", [None, "ct-w4a16"])
def test_groups_that_workers_cannot_divide_are_refused_before_anything_starts(
    layout: str | None, tmp_path: Path
) -> None:
    shape = {**SMALL_SHAPE, "hidden_size": 256, "intermediate_size": 192, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(tmp_path)
    settings: dict[str, Any] = {"num_threads": 4}
    said = "cannot divide the quantised weight model.layers.0.mlp.down_proj.weight: inputs 0 to 48 are not whole"
    if layout is None:
        settings["quantization"] = "int4"
        said = "cannot divide the groups of 32 inputs of model.layers.0.mlp.down_proj.weight: use --quantization int8"
    else:
        quantize_directory(model, tmp_path, LAYOUTS[layout])
    plan(tmp_path, **settings)
    with pytest.raises(StartRefused, match=f"^tensor_parallel_size 4 {re.escape(said)}"):
        plan(tmp_path, **settings, tensor_parallel_size=4)


def test_a_format_that_cannot_be_used_is_refused_and_not_planned_as_empty(
    demo_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(demo_base, num_threads=2, data_parallel_size=2)
    config = read_model(settings)[1]
    monkeypatch.setattr(memory_plan, "plan_engine", lambda config, method: MemoryPlan("int4", problem="no group fits"))
    with pytest.raises(StartRefused, match=r"^no group fits$"):
        plan_engines(settings, config)


def test_more_engines_than_threads_are_refused(demo_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartRefused) as refused:
        plan(demo_base, num_threads=2, data_parallel_size=3)
    assert str(refused.value) == "3 engines need a thread each, but num_threads is 2: lower data_parallel_size"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(StartRefused, match=r"may use 2 CPUs .*: set num_threads, or lower data_parallel_size"):
        plan(demo_base, data_parallel_size=3)


def test_engines_that_do_not_fit_into_the_memory_together_are_refused(
    demo_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"pool_bytes": 1 << 30, "host_tier_bytes": 1 << 30, "num_threads": 2}
    monkeypatch.setattr(engine_plans, "free_memory", lambda: 4 << 30)
    plan(demo_base, **sizes)
    with pytest.raises(StartRefused) as refused:
        plan(demo_base, **sizes, data_parallel_size=2)
    assert str(refused.value).startswith("2 engines need 5.")
    assert "1.0 GiB of pages and 1.0 GiB of host tier each, but 4.0 GiB are available" in str(refused.value)
    fewer = {**sizes, "host_tier_bytes": 0, "data_parallel_size": 2}
    plan(demo_base, **fewer)
    # Each further worker has a process and an embedding of its own.
    with pytest.raises(StartRefused, match=r"^2 engines need 7\."):
        plan(demo_base, **{**fewer, "num_threads": 16}, tensor_parallel_size=8)
    with pytest.raises(StartRefused, match=r"2 engines need .* and 1\.0 GiB of host tier each, but"):
        plan(demo_base, **{**sizes, "host_tier_bytes": 0, "kv_host_bytes": 1 << 30}, data_parallel_size=2)


def test_host_memory_for_evicted_prefixes_must_be_free(demo_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_config, engine_plans):
        monkeypatch.setattr(module, "free_memory", lambda: 4 << 30)
    assert [one.kv_host_bytes for one in plan(demo_base, kv_host_bytes="2GiB")] == [2 << 30]
    # The weights, the pool and the processes need the rest.
    with pytest.raises(
        StartRefused, match=r"^the engine needs 4\..* are available: lower pool_bytes, host_tier_bytes or"
    ):
        plan(demo_base, kv_host_bytes="4GiB")
    with pytest.raises(StartRefused) as refused:
        plan(demo_base, kv_host_bytes="5GiB")
    assert str(refused.value) == "kv_host_bytes is 5.0 GiB, but only 4.0 GiB of memory are available: lower it"


def test_disk_space_for_evicted_prefixes_must_be_free(
    demo_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=8 << 30)
    monkeypatch.setattr(engine_plans, "shutil", SimpleNamespace(disk_usage=lambda _: usage))
    sizes: dict[str, Any] = {"kv_host_bytes": "64MiB", "disk_tier_dir": tmp_path / "not yet" / "there"}
    [planned] = plan(demo_base, **sizes, kv_disk_bytes="8GiB")
    assert (planned.kv_disk_bytes, planned.cache_dir) == (8 << 30, str(tmp_path / "not yet" / "there"))
    assert [one.kv_disk_bytes for one in plan(demo_base, **sizes)] == [0]
    with pytest.raises(StartRefused) as refused:
        plan(demo_base, **sizes, kv_disk_bytes="9GiB")
    assert str(refused.value) == (
        f"kv_disk_bytes needs 9.0 GiB of disk space, but 8.0 GiB are free in {tmp_path}: lower it, or set "
        "disk_tier_dir to a directory on a larger disk"
    )
    with pytest.raises(StartRefused, match=r"^kv_disk_bytes needs 12\.0 GiB"):
        plan(demo_base, **sizes, kv_disk_bytes="6GiB", data_parallel_size=2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_disk_bytes": "1GiB"}, "kv_disk_bytes keeps the pages that the main memory of kv_host_bytes evicts: set"),
        (
            {"kv_host_bytes": "1MiB", "kv_disk_bytes": 5},
            "kv_disk_bytes is 5 bytes, but a page of keys and values",
        ),
    ],
    ids=["without main memory", "less than a page"],
)
def test_disk_space_that_is_of_no_use_is_refused_before_anything_starts(
    settings: dict[str, Any], said: str, demo_base: Path
) -> None:
    with pytest.raises(StartRefused, match=f"^{said}"):
        plan(demo_base, **settings)


@pytest.mark.parametrize(
    ("settings", "page_bytes"),
    # A page has K and V of 16 tokens in 4 layers of 2 heads. A token in int8 also has a scale of 2 bytes.
    [({}, 16 * 2 * 4 * 2 * 32 * 2), ({"kv_dtype": "int8"}, 16 * 2 * 4 * 2 * (32 + 2))],
    ids=["bfloat16", "int8"],
)
def test_host_memory_for_less_than_a_page_is_refused_before_anything_starts(
    demo_base: Path, settings: dict[str, Any], page_bytes: int
) -> None:
    assert [one.kv_host_bytes for one in plan(demo_base, **settings, kv_host_bytes=page_bytes)] == [page_bytes]
    with pytest.raises(StartRefused) as refused:
        read_model(settings_of(demo_base, **settings, kv_host_bytes=page_bytes - 1), runs_here=False)
    assert str(refused.value) == (
        f"kv_host_bytes is {page_bytes - 1} bytes, but a page of keys and values takes {page_bytes}: set it to at "
        f"least {page_bytes}, or to 0"
    )


def test_each_engine_gets_a_gpu(demo_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_plans, "count_gpus", lambda: 4)
    assert [one.gpus for one in plan_on_gpus(demo_base)] == [()]
    engines = plan_on_gpus(demo_base, data_parallel_size=2)
    assert [(one.gpus, one.num_threads) for one in engines] == [((0,), 4), ((1,), 4)]
    assert [one.gpus for one in plan_on_gpus(demo_base, devices="3,1")] == [(3,), (1,)]
    assert [one.gpus for one in plan_on_gpus(demo_base, devices="2")] == [(2,)]
    with pytest.raises(StartRefused) as refused:
        plan_on_gpus(demo_base, devices="1,4")
    assert str(refused.value) == "there is no GPU 4: this machine has 4, numbered from 0; change devices"
    with pytest.raises(StartRefused) as refused:
        plan_on_gpus(demo_base, data_parallel_size=5)
    assert str(refused.value) == "5 engines need as many GPUs, but this machine has 4: lower data_parallel_size"


def test_each_worker_gets_a_gpu(demo_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_plans, "count_gpus", lambda: 4)
    assert [one.gpus for one in plan_on_gpus(demo_base, tensor_parallel_size=2)] == [()]
    both = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    assert [(one.gpus, one.num_threads) for one in plan_on_gpus(demo_base, **both)] == [((0, 1), 4), ((2, 3), 4)]
    [engine] = plan_on_gpus(demo_base, tensor_parallel_size=2, devices="3,1")
    assert engine.gpus == (3, 1)
    engines = plan_on_gpus(demo_base, tensor_parallel_size=2, devices="3,1,0,2")
    assert [one.gpus for one in engines] == [(3, 1), (0, 2)]
    # A thread for each worker is the least that an engine accepts.
    engines = plan_on_gpus(demo_base, **both, num_threads=2)
    assert [one.num_threads for one in engines] == [2, 2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"tensor_parallel_size": 2},
            "the 2 workers need a GPU each, but this machine has 1: lower tensor_parallel_size",
        ),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 2},
            "the 2 workers of each of 2 engines need a GPU each, but this machine has 1: lower data_parallel_size or "
            "tensor_parallel_size",
        ),
    ],
    ids=["one engine", "two engines"],
)
def test_more_workers_than_gpus_are_refused_before_anything_starts(
    settings: dict[str, Any], said: str, demo_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_plans, "count_gpus", lambda: 1)
    with pytest.raises(StartRefused) as refused:
        plan_on_gpus(demo_base, **settings)
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size is invalid: it should be greater than or equal to 1, not 0"),
        ({"data_parallel_size": -2}, "data_parallel_size is invalid: it should be greater than or equal to 1"),
        ({"data_parallel_size": 65}, "data_parallel_size is invalid: it should be less than or equal to 64"),
        ({"devices": "0,0"}, "devices is invalid: a GPU cannot be used twice, but 0 is named twice"),
        ({"devices": "0,a"}, "devices is invalid: it should be numbers of GPUs with commas between them, such as 0,1"),
        ({"devices": "-1"}, "devices is invalid: it should be numbers of GPUs"),
        (
            {"devices": "0,1", "data_parallel_size": 3},
            "devices is invalid: it names 2 GPUs, but 3 engines need 3: name as many",
        ),
        (
            {"devices": "0,1", "data_parallel_size": 1},
            "devices is invalid: it names 2 GPUs, but 1 engine needs 1: name as many",
        ),
        (
            {"devices": "0", "tensor_parallel_size": 2},
            "devices is invalid: it names 1 GPU, but 1 engine of 2 workers needs 2: name as many",
        ),
        (
            {"devices": "0,1,2,3,4", "tensor_parallel_size": 2},
            "devices is invalid: it names 5 GPUs, but 2 engines of 2 workers need 4: name as many",
        ),
        (
            {"devices": "0,1", "tensor_parallel_size": 2, "data_parallel_size": 2},
            "devices is invalid: it names 2 GPUs, but 2 engines of 2 workers need 4: name as many",
        ),
        ({"devices": "0,1", "device": "cpu"}, "it names GPUs, but device is cpu"),
        ({"data_parallel_size": 2, "cluster": "local"}, "starts no engine itself: remove data_parallel_size"),
        ({"devices": "0", "cluster": "local"}, "starts no engine itself: remove devices"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is invalid: it should be greater than or equal to 1"),
        ({"engine": "a.sock,a.sock"}, "engine is invalid: it names a socket twice"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused_with_one_sentence(
    demo_base: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(Settings, {"model": demo_base, **given})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_named_gpus_are_needed_even_if_the_device_is_chosen_automatically(
    demo_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(StartRefused, match="the device 'cuda' needs"):
        read_model(load_settings(Settings, {"model": demo_base, "devices": "0,1"}))


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy engine never reports its state."""
    monkeypatch.setattr(data_parallel, "STATS_WAIT_S", 0.05)


def toys(tmp_path: Path, **more: Any) -> LocalEngines:
    config = EngineConfig(model_dir="", blob_url="", cache_dir="", max_sequences=4, **more)
    settings = Settings.model_construct(router="homes", log_format="console")
    command = (sys.executable, str(toy_engine.__file__), str(tmp_path))
    directory = DataDirectory(tmp_path / "data")
    directory.root.mkdir()
    supervision, strikes = Supervision(first_delay_s=0.02), CrashStrikes(time.monotonic)
    return LocalEngines(settings, directory, [config] * 2, supervision, command, strikes)


def test_a_killed_engine_is_restarted_beside_the_other(tmp_path_factory: pytest.TempPathFactory) -> None:
    # The name of the test would make the sockets' paths too long.
    tmp_path = tmp_path_factory.mktemp("run")

    async def scenario() -> None:
        engines = toys(tmp_path)
        await engines.spawn()
        await engines.start()
        try:
            first, second = engines.engines.engines.values()
            sockets = [tmp_path / "data" / "run" / f"engine-{number}" / "engine.sock" for number in range(2)]
            assert all(path.is_socket() for path in sockets)
            assert engines.place.split()[1] == ",".join(map(str, sockets))
            assert (tmp_path / "data" / "run").stat().st_mode & 0o077 == 0
            killed = first.pid  # type: ignore[attr-defined]
            os.kill(killed, signal.SIGKILL)
            async with asyncio.timeout(60):
                while first.is_ready:  # noqa: ASYNC110  another process sets no event here
                    await asyncio.sleep(0.01)
                assert second.is_ready
                assert engines.client.is_ready
                while not first.is_ready:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert first.pid != killed  # type: ignore[attr-defined]
        finally:
            await engines.close()
        await engines.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("is_compiled", "num_at_once"), [(True, 2), (False, 1)])
def test_programs_for_gpus_are_compiled_by_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compiled: bool, num_at_once: int
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    programs = tmp_path / "programs"
    if is_compiled:
        (programs / "one").mkdir(parents=True)

    async def scenario() -> None:
        engines = toys(tmp_path, device="cuda", program_dir=str(programs))
        found = engines.engines.engines.values()
        try:
            await engines.spawn()
            assert sum(one.pid is not None for one in found) == num_at_once  # type: ignore[attr-defined]
            await engines.start()
            assert all(one.is_ready for one in found)
        finally:
            await engines.close()

    asyncio.run(scenario())


def test_an_engine_that_does_not_start_is_named_and_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "fails").write_text("the weights are torn")

    async def scenario() -> None:
        engines = toys(tmp_path)
        with pytest.raises(EngineStartError, match=r"engine-[01]: the engine did not start: the weights are torn"):
            await engines.start()
        await engines.close()

    asyncio.run(scenario())


@pytest.fixture
def server(demo_base: Path, tmp_path: Path) -> Iterator[Server]:
    """A server with two engines of four sequence slots each, so that most of the requests wait."""
    ports = ("--port", 0, "--admin-port", 0)
    arguments = ("serve", "--model", demo_base, "--data-dir", tmp_path / "data", *ports, "--data-parallel-size", 2)
    sizes = {"LORAMUX_NUM_THREADS": "2", "LORAMUX_POOL_BYTES": "64MiB", "LORAMUX_MAX_SEQUENCES": "4"}
    with Server(arguments, sizes) as server:
        yield server


class Server:
    def __init__(self, arguments: Sequence[object], variables: Mapping[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "loramux.admin.cli", *map(str, arguments)],
            env={**inherited, "PYTHONPATH": ".src", "LORAMUX_ADMIN_KEY": ADMIN_KEY, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        _, openai, admin, _, place = words(self.process, 5)
        self.url, self.admin_url, self.sockets = openai[-1].removesuffix("/v1"), admin[-1], place[1]
        self.admin = httpx.Client(trust_env=False, timeout=30, headers={"authorization": f"Bearer {ADMIN_KEY}"})

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *raised: object) -> None:
        self.admin.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def engines_ready(self) -> dict[str, bool]:
        found: dict[str, bool] = self.admin.get(f"{self.admin_url}/health/ready").json()["engines"]
        return found

    def engine_pids(self) -> list[int]:
        children = children_of(self.process.pid)
        return sorted(pid for pid in children if b"engine.server.process" in Path(f"/proc/{pid}/cmdline").read_bytes())


def stream(url: str, key: str, number: int) -> httpx.Response:
    body = {
        "model": "base",
        "prompt": [5 + number],
        "max_tokens": 150,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    with httpx.Client(trust_env=False, timeout=120) as http:
        return http.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


@pytest.mark.campaign
@pytest.mark.data_parallel
def test_served_engines_survive_a_kill_under_streams(server: Server, demo_base: Path, tmp_path: Path) -> None:
    rest = f"{server.admin_url}/admin/v1"
    server.admin.post(f"{rest}/tenants", json={"slug": "acme"})
    key = server.admin.post(f"{rest}/api_keys", json={"tenant": "acme"}).json()["secret"]
    assert server.engines_ready() == {"engine-0": True, "engine-1": True}
    num_streams = 24
    with ThreadPoolExecutor(num_streams) as pool:
        streams = [pool.submit(stream, server.url, key, number) for number in range(num_streams)]
        while server.admin.get(f"{rest}/engine", params={"replica": "engine-0"}).json()["num_running"] < 4:
            time.sleep(0.02)
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        killed_s = time.monotonic()
        while not all(server.engines_ready().values()) or time.monotonic() - killed_s < 0.5:
            time.sleep(0.05)
        replaced_s = time.monotonic() - killed_s
        answers = [one.result() for one in streams]
    ended = [one for one in answers if '"code":"engine_unavailable"' in one.text]
    complete = [one for one in answers if one.text.rstrip().endswith("data: [DONE]") and one not in ended]
    print(f"\n{len(complete)} complete, {len(ended)} ended by an error, replaced after {replaced_s:.1f} s")
    assert len(complete) + len(ended) == num_streams
    assert 1 <= len(ended) <= 4, "only what ran in the killed engine ends with the error"

    # A further gateway uses both engines.
    url = f"sqlite:///{tmp_path / 'data' / 'loramux.db'}"
    joining = ("--model", demo_base, "--engine", server.sockets, "--database-url", url, "--port", 0, "--admin-port", 0)
    gateway = start("gateway", *joining, "--data-dir", tmp_path / "second")
    try:
        _, openai, metrics = words(gateway, 3)
        with ThreadPoolExecutor(8) as pool:
            joined = list(pool.map(lambda i: stream(openai[-1].removesuffix("/v1"), key, i), range(8)))
        assert all(one.text.rstrip().endswith("data: [DONE]") for one in joined)
        for at in (server.admin_url, metrics[-1]):
            shown = server.admin.get(f"{at}/metrics").text.splitlines()
            assert {f'loramux_engine_up{{engine="engine-{number}"}} 1.0' for number in range(2)} <= set(shown)
    finally:
        gateway.terminate()
        gateway.communicate(timeout=30)
    listed = server.admin.get(f"{rest}/replicas").json()["data"]
    assert [(one["id"], one["state"], one["address"]) for one in listed] == [
        ("engine-0", "serving", "cpu"),
        ("engine-1", "serving", "cpu"),
    ]
    # Running streams are drained.
    with ThreadPoolExecutor(8) as pool:
        last = [pool.submit(stream, server.url, key, number) for number in range(8)]
        while server.admin.get(f"{rest}/engine").json()["num_running"] < 8:
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        drained = [one.result() for one in last]
    assert all(one.text.rstrip().endswith("data: [DONE]") for one in drained)
    _, errors = server.process.communicate(timeout=40)
    assert (server.process.returncode, "Traceback" in errors) == (0, False), errors

    database = Database(url)
    bills = {event.request_id: event for event in Ledger(database).events(None, limit=100).data}
    database.close()
    for answer in (*answers, *joined, *drained):
        received = sum(len(ids.split(",")) for ids in re.findall(r'"token_ids":\[([0-9,]+)\]', answer.text))
        bill = bills[answer.headers["x-request-id"]]
        assert (bill.prompt_tokens, bill.completion_tokens) == (1, received)
