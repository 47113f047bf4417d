from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from loramux.adapter_store.formats.version_files.answer_parsers import AnswerParsers
from loramux.adapter_store.formats.version_files.generation_config import SamplingDefaults
from loramux.adapter_store.sandbox.confinement import ESSENTIAL, REQUIRED
from loramux.admin.errors import StartRefused
from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.settings import Settings
from loramux.admin.serving import serve
from loramux.admin.serving.assembly import Assembled, assemble
from loramux.admin.serving.gateway_assembly import NUM_THREADS, gateway_settings
from loramux.admin.serving.serve import read_model
from loramux.engine.loop.config import EngineConfig
from loramux.migrations.database import Database
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.requests import services as services_module
from loramux.platform.threads import call_on
from tests.migrated import migrated_sqlite
from tests.platform.ready_adapters import add_ready_adapter
from tests.platform.scripted_engine import ScriptedEngine


def assembling(model: Path, tmp_path: Path, **given: str) -> AbstractContextManager[Assembled]:
    settings = Settings(model=model, data_dir=tmp_path, **given)  # type: ignore[arg-type]
    decoder, config = read_model(settings)
    return assemble(settings, DataDirectory(tmp_path), decoder, config, ScriptedEngine(), is_loopback=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_waiting_tokens", 1000),
        ("max_waiting_s", 12.5),
        ("max_resident_adapters", 7),
        ("max_pinned_share", 0.25),
        ("eviction_policy", "greedy_dual"),
        ("max_batch_tokens", 96),
        ("max_sequences", 3),
    ],
)
def test_operator_settings_reach_the_engine(demo_base: Path, tmp_path: Path, name: str, value: Any) -> None:
    default = read_model(Settings(model=demo_base, data_dir=tmp_path))[1]
    config = read_model(Settings(model=demo_base, data_dir=tmp_path, **{name: value}))[1]
    assert getattr(config, name) == value != getattr(default, name)


def test_servers_on_one_host_can_share_a_disk_tier(demo_base: Path, tmp_path: Path) -> None:
    own = read_model(Settings(model=demo_base, data_dir=tmp_path / "data"))[1]
    shared = read_model(Settings(model=demo_base, data_dir=tmp_path / "data", disk_tier_dir=tmp_path / "shared"))[1]
    assert (own.cache_dir, shared.cache_dir) == (str(tmp_path / "data" / "disk-tier"), str(tmp_path / "shared"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gpu_programs_are_stored_in_the_data_directory(
    device: str, demo_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "resolve_device", lambda requested, gpus: device)
    config = read_model(Settings(model=demo_base, data_dir=tmp_path))[1]
    assert config.program_dir == {"cpu": None, "cuda": str(tmp_path / "programs")}[device]


def test_settings_and_engine_config_have_the_same_defaults(demo_base: Path, tmp_path: Path) -> None:
    config = read_model(Settings(model=demo_base, data_dir=tmp_path))[1]
    plain = EngineConfig(model_dir="", blob_url="", cache_dir="")
    for name in ("max_waiting_tokens", "max_waiting_s", "max_pinned_share", "eviction_policy", "max_sequences"):
        assert getattr(config, name) == getattr(plain, name)


@pytest.mark.parametrize(("sandbox", "required"), [("preferred", ()), ("required", ESSENTIAL)])
def test_required_sandbox_applies_to_every_confined_process(
    demo_base: Path, tmp_path: Path, sandbox: str, required: tuple[str, ...]
) -> None:
    with assembling(demo_base, tmp_path, sandbox=sandbox) as assembled:
        services = assembled.admin_app.state.services
        assert services.adapters.ingest._processor._validation.validator._validator._required == required
        assert services.engine.self_check.is_sandbox_required is bool(required)
        prompts = assembled.gateway_app.state.services.prompts
        for pool in (prompts.grammars._pool, prompts.chat_prompts._tenants._pool):
            assert (REQUIRED in pool._servers[0]._command) is bool(required)
    settings = Settings(model=demo_base, data_dir=tmp_path, sandbox=sandbox)  # type: ignore[arg-type]
    assert read_model(settings)[1].is_sandbox_required is bool(required)


def test_findings_name_a_database_that_refuses_writes(demo_base: Path, tmp_path: Path) -> None:
    """Reading from the database still succeeds, for example while its disk is full."""
    with assembling(demo_base, tmp_path) as assembled:
        assembled.gateway.run.database_health.note_failure(OSError())
        findings = assembled.admin_app.state.services.engine.self_check.findings()
    (database,) = (finding for finding in findings if finding.check == "database")
    assert (database.grade.value, database.message) == ("failed", "the database does not accept writes (OSError)")
    assert "free space" in str(database.mend)


def test_server_with_other_weights_serves_no_version_of_the_first(
    demo_base: Path, tmp_path: Path, database_url: str
) -> None:
    other = shutil.copytree(demo_base, tmp_path / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-100] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    database = Database(database_url)
    database.upgrade()
    tenant = Tenants(database).create("acme")
    add_ready_adapter(database, tenant.id, "support", ["1" * 64])
    verdicts = []
    for model in (demo_base, other, demo_base):
        with assembling(model, tmp_path / f"data-{len(verdicts)}", database_url=database_url) as assembled:
            found = assembled.gateway_app.state.services.callers.resolver._registry.resolve("acme", "support")
            assert found is not None
            verdicts.append((assembled.base_id, found.base_verdict))
    database.close()
    assert [verdict for _, verdict in verdicts] == ["ready", "pending", "ready"]
    assert verdicts[0][0] == verdicts[2][0] != verdicts[1][0]


def test_empty_database_is_migrated(demo_base: Path, tmp_path: Path, database_url: str) -> None:
    with assembling(demo_base, tmp_path, database_url=database_url) as assembled:
        assert not assembled.gateway.callers.api_keys.has_platform_admin()
    database = Database(database_url)
    database.check_schema()
    database.close()


def test_admin_work_takes_no_threads_or_connections_from_inference(
    demo_base: Path, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While every admin thread holds a database connection, each gateway thread still gets one."""
    monkeypatch.setattr(services_module, "CALL_WAIT_S", 60.0)
    meeting, is_over = threading.Barrier(NUM_THREADS), threading.Event()
    with assembling(demo_base, tmp_path, database_url=database_url) as assembled:
        gateway, admin = assembled.gateway_app.state.services, assembled.admin_app.state.services

        def linger() -> None:
            with admin.database.read() as connection:
                connection.execute(select(1))
                is_over.wait(30)

        def meet() -> None:
            with gateway.database.read() as connection:
                connection.execute(select(1))
                meeting.wait(25)

        async def all_at_once() -> None:
            lingering = [
                asyncio.ensure_future(call_on(executor, linger))
                for executor in (admin.executor, admin.report_executor)
                for _ in range(2 * NUM_THREADS)
            ]
            try:
                await asyncio.gather(*(gateway.call(meet) for _ in range(NUM_THREADS)))
            finally:
                is_over.set()
                await asyncio.gather(*lingering)

        asyncio.run(all_at_once())


def test_external_database_with_another_version_is_refused(demo_base: Path, tmp_path: Path) -> None:
    path = tmp_path / "loramux.db"
    database = Database(migrated_sqlite(path))
    with database.write() as connection:
        connection.exec_driver_sql("DELETE FROM alembic_version")
    database.close()
    with (
        pytest.raises(StartRefused, match="run 'loramux db upgrade'"),
        assembling(demo_base, tmp_path, database_url=f"sqlite:///{path}"),
    ):
        pass


def test_database_from_a_newer_release_is_refused(demo_base: Path, tmp_path: Path) -> None:
    database = Database(migrated_sqlite(tmp_path / "loramux.db"))
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    with pytest.raises(StartRefused, match="another version of loramux"), assembling(demo_base, tmp_path):
        pass


@pytest.mark.parametrize("is_embedded", [True, False], ids=["embedded", "external"])
def test_database_from_before_the_first_step_is_refused(demo_base: Path, tmp_path: Path, is_embedded: bool) -> None:
    path = tmp_path / "loramux.db"
    database = Database(migrated_sqlite(path))
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0020'")
    database.close()
    given = {} if is_embedded else {"database_url": f"sqlite:///{path}"}
    with (
        pytest.raises(StartRefused, match="use commit db435589 to upgrade it to 0021"),
        assembling(demo_base, tmp_path, **given),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param({"database_url": "postgresql://127.0.0.1:9/x"}, "cannot be used", id="database down"),
        pytest.param({"database_url": "sqlite:////proc/nowhere/x.db"}, "cannot be used", id="unwritable SQLite path"),
        pytest.param({"blob_url": "file:///proc/nowhere"}, "/proc/nowhere", id="unwritable blob path"),
        pytest.param({"blob_url": "s3://B"}, "names no valid bucket", id="bucket"),
    ],
)
def test_unusable_store_is_refused(demo_base: Path, tmp_path: Path, given: dict[str, str], said: str) -> None:
    with pytest.raises(StartRefused, match=said), assembling(demo_base, tmp_path, **given):
        pass


def test_database_failure_during_startup_recovery_is_refused(demo_base: Path, tmp_path: Path) -> None:
    migrated_sqlite(tmp_path / "loramux.db")
    with closing(sqlite3.connect(tmp_path / "loramux.db")) as connection:
        connection.execute("ALTER TABLE uploads RENAME TO gone")
    with pytest.raises(StartRefused, match="the database cannot be used: no such table"):
        assembling(demo_base, tmp_path).__enter__()


def test_a_model_without_a_tokenizer_is_refused(demo_base: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((demo_base / "config.json").read_bytes())
    with pytest.raises(StartRefused, match="tokenizer"), assembling(tmp_path / "model", tmp_path):
        pass


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param("{", "not JSON", id="no json"),
        pytest.param("{}", "architecture", id="empty"),
        pytest.param('{"architectures": ["GPT2LMHeadModel"]}', "GPT2LMHeadModel", id="architecture"),
    ],
)
def test_unsupported_model_is_refused(tmp_path: Path, config: str, said: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(StartRefused, match=said):
        read_model(Settings(model=tmp_path))


@pytest.mark.parametrize(
    ("switch", "content", "expected"),
    [
        pytest.param("auto", '{"temperature": 0.5}', SamplingDefaults(temperature=0.5), id="auto"),
        pytest.param("off", '{"temperature": 0.5}', SamplingDefaults(), id="off"),
        pytest.param("off", '{"temperature": 3}', SamplingDefaults(), id="off, invalid"),
        pytest.param("auto", None, SamplingDefaults(), id="no file"),
    ],
)
def test_base_defaults_come_from_the_model_directory(
    switch: str, content: str | None, expected: SamplingDefaults, demo_base: Path, tmp_path: Path
) -> None:
    settings = Settings(model=copied(demo_base, tmp_path, content), data_dir=tmp_path, generation_config=switch)
    assert gateway_settings(settings).base_defaults == expected


def test_parsers_of_the_base_come_from_the_settings(demo_base: Path, tmp_path: Path) -> None:
    settings = Settings(model=demo_base, data_dir=tmp_path, tool_call_parser="pythonic", reasoning_parser="off")
    assert gateway_settings(settings).base_parsers == AnswerParsers("pythonic", "off")


def test_invalid_generation_config_of_the_base_is_refused(demo_base: Path, tmp_path: Path) -> None:
    model = copied(demo_base, tmp_path, '{"temperature": 3}')
    with pytest.raises(StartRefused, match=r"temperature must be .*set generation_config to off"):
        gateway_settings(Settings(model=model, data_dir=tmp_path))


def copied(model: Path, directory: Path, generation_config: str | None) -> Path:
    place = directory / "copy"
    place.mkdir()
    shutil.copyfile(model / "config.json", place / "config.json")
    if generation_config is not None:
        (place / "generation_config.json").write_text(generation_config)
    return place
