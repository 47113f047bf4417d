from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from loramux.adapter_store.errors import ValidationFailed
from loramux.adapter_store.sandbox.confinement import CALLS, ESSENTIAL, FILES, MEASURES, NETWORK
from loramux.adapter_store.validation.validator import missing_measures
from loramux.admin.cli import app
from loramux.admin.client.client import AdminClient
from loramux.admin.doctor import checks, doctor, self_check
from loramux.admin.doctor.doctor import HostSettings, check_host, check_server
from loramux.admin.doctor.findings import Finding, Grade
from loramux.engine.protocol.messages import DecodeReads
from loramux.engine.quantizing.messages import QUALITY_FILES, Quality
from loramux.migrations.database import Database
from tests.admin.admin_side import ADMIN_KEY, AdminSide
from tests.admin.command_line import Run
from tests.migrated import migrated_sqlite


def graded(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.grade.value for finding in findings}


def found(result: Any) -> dict[str, dict[str, Any]]:
    document = json.loads(result.stdout)
    assert document["healthy"] is (result.exit_code == 0)
    return {finding["check"]: finding for finding in document["findings"]}


def test_healthy_server_passes_every_check(
    loramux: Run, admin_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin_side.services.engine.self_check.data_dir.chmod(0o700)
    admin_side.engine.quantization = "int4"
    result = loramux("doctor", "--json")
    assert result.exit_code == 0, result.stdout
    checked = found(result)
    assert " serves the-base with weights in int4 and answered in " in checked["server"]["message"]
    # The sandbox grade depends on the machine that runs the tests.
    assert checked.pop("sandbox")["grade"] in ("ok", "warning")
    assert {finding["grade"] for finding in checked.values()} == {"ok"}
    assert {
        "python",
        "torch",
        "cpu",
        "server",
        "versions",
        "clock",
        "engine",
        "database",
        "object store",
        "disk",
    } <= set(checked)
    assert "bandwidth" not in checked, "the engine runs on a CPU"
    admin_side.engine.decode_reads = DecodeReads(num_bytes=600, seconds=2.0, bandwidth=500.0)
    used = found(loramux("doctor", "--json"))["bandwidth"]
    assert used["message"] == "decode steps have used 60 % of the GPU's memory bandwidth"
    spoken = loramux("doctor")
    assert (spoken.exit_code, "engine: the engine serves the-base" in spoken.stdout) == (0, True)


def test_failed_parts_are_distinguished_from_an_unreachable_server(
    loramux: Run, admin_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin_side.engine.die()
    # Replace the store's directory with a file, because root would bypass restricted permissions.
    shutil.rmtree(admin_side.services.engine.self_check.data_dir / "blobs", ignore_errors=True)
    (admin_side.services.engine.self_check.data_dir / "blobs").write_text("no directory")
    with admin_side.services.database.write() as connection:
        connection.exec_driver_sql("DELETE FROM alembic_version")
    result = loramux("doctor", "--json")
    checked = found(result)
    assert result.exit_code == 1
    assert (checked["server"]["grade"], checked["engine"]["grade"]) == ("ok", "failed")
    assert checked["object store"]["grade"] == "failed"
    assert "loramux db upgrade" in checked["database"]["mend"]
    monkeypatch.setenv("LORAMUX_ADMIN_URL", "http://127.0.0.1:9")
    away = found(loramux("doctor", "--json"))
    assert (away["server"]["grade"], "engine" in away) == ("failed", False)


@pytest.mark.parametrize(
    ("error", "said", "said_without_reason"),
    [
        (httpx.ReadTimeout("timed out"), "{} took too long to answer", "{} took too long to answer"),
        (httpx.ReadError("reset"), "the connection to {} broke (reset)", "no loramux server answers at {} (reset)"),
    ],
    ids=["no answer", "broken connection"],
)
def test_server_that_answers_no_calls_says_why_it_is_not_ready(
    admin_side: AdminSide,
    admin_url: str,
    monkeypatch: pytest.MonkeyPatch,
    error: httpx.TransportError,
    said: str,
    said_without_reason: str,
) -> None:
    def hang(*_: object, **__: object) -> None:
        raise error

    admin_side.engine.die()
    with AdminClient(admin_url, ADMIN_KEY) as client:
        monkeypatch.setattr(client._http, "request", hang)
        monkeypatch.setattr(client._http, "get", partial(httpx.get, trust_env=False))
        (finding,) = check_server(client)
        assert finding.grade is Grade.FAILED
        assert finding.message.startswith(f"{said.format(admin_url)}, and it is not ready: ")
        assert finding.mend is not None
        assert not finding.mend.startswith("start the server")
        monkeypatch.setattr(client._http, "get", hang)
        (finding,) = check_server(client)
        assert finding.message.startswith(said_without_reason.format(admin_url))
        assert "not ready" not in finding.message
        assert finding.mend is not None
        assert finding.mend.startswith("start the server")


REFUSES_WRITES = "the database does not accept writes (OperationalError)"


@pytest.mark.parametrize(
    ("trouble", "checked", "expected"),
    [
        pytest.param(REFUSES_WRITES, Grade.OK, REFUSES_WRITES, id="healthy to readers"),
        pytest.param(REFUSES_WRITES, Grade.WARNING, REFUSES_WRITES, id="slow to readers"),
        pytest.param(REFUSES_WRITES, Grade.FAILED, "checked", id="stopped"),
        pytest.param("the database does not answer", None, "the database does not answer", id="silent"),
        pytest.param(None, Grade.OK, "checked", id="no trouble"),
    ],
)
def test_database_with_trouble_is_checked_unless_it_does_not_answer(
    admin_side: AdminSide,
    monkeypatch: pytest.MonkeyPatch,
    trouble: str | None,
    checked: Grade | None,
    expected: str,
) -> None:
    def check(_: Database) -> list[Finding]:
        assert checked is not None, "the check would only wait"
        skew = Finding(check="database clock", grade=Grade.FAILED, message="skewed")
        return [Finding(check="database", grade=checked, message="checked"), skew]

    monkeypatch.setattr(self_check, "check_database", check)
    one = replace(admin_side.services.engine.self_check, trouble=lambda: trouble)
    findings = [finding for finding in one.findings() if finding.check.startswith("database")]
    assert [finding.message for finding in findings] == [expected] + ([] if checked is None else ["skewed"])
    assert (findings[0].grade is Grade.OK) is (trouble is None)


def test_unsuitable_key_is_reported(loramux: Run, admin_side: AdminSide, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = admin_side.services.accounts.tenants.create("acme")
    a_tenants = admin_side.services.accounts.api_keys.create(tenant.id, "reader", ["tenant:read"]).secret
    assert a_tenants is not None
    for key, said in (("wrong", "another"), (a_tenants, "platform:read")):
        monkeypatch.setenv("LORAMUX_ADMIN_KEY", key)
        result = loramux("doctor", "--json")
        assert (result.exit_code, said in found(result)["server"]["mend"]) == (1, True)


def test_clock_skew_and_version_mismatch_are_reported(admin_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda _name: "0.0.9")
    clocks = {0: "ok", 8: "warning", -8: "warning", 600: "failed", -600: "failed"}
    with AdminClient(admin_url, ADMIN_KEY) as client:
        for offset_s, grade in clocks.items():
            findings = list(check_server(client, now_s=lambda by=offset_s: doctor.time.time() + by))  # type: ignore[attr-defined]
            assert graded(findings)["clock"] == grade
            assert graded(findings)["versions"] == "warning"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The data directory of a server that has shut down."""
    directory = tmp_path / "data"
    (directory / "blobs").mkdir(parents=True)
    directory.chmod(0o700)
    migrated_sqlite(directory / "loramux.db")
    return directory


def test_machine_without_a_server_is_checked(
    host: Path, demo_base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LORAMUX_ADMIN_KEY", raising=False)
    monkeypatch.delenv("LORAMUX_ADMIN_URL", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    arguments = ["doctor", "--data-dir", str(host), "--model", str(demo_base), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stdout
    checked = found(result)
    assert checked["server"]["grade"] == "warning"
    names = ("model", "tokenizer", "database", "object store", "socket directory")
    assert {checked[name]["grade"] for name in names} == {"ok"}


def test_missing_tokenizer_fails_and_missing_chat_template_warns(demo_base: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(demo_base, base)
    settings = HostSettings(data_dir=tmp_path / "data", model=base)
    config = base / "tokenizer_config.json"
    declared = json.loads(config.read_text())
    del declared["chat_template"]
    config.write_text(json.dumps(declared))
    assert graded(list(check_host(settings)))["tokenizer"] == "warning"
    (base / "tokenizer.json").unlink()
    findings = {finding.check: finding for finding in check_host(settings)}
    assert (findings["model"].grade, findings["tokenizer"].grade) == (Grade.OK, Grade.FAILED)
    assert "tokenizer.json is missing" in findings["tokenizer"].message


def test_checks_create_no_files(tmp_path: Path) -> None:
    findings = list(check_host(HostSettings(data_dir=tmp_path / "none")))
    assert graded(findings)["database"] == "warning"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "check", "said"),
    [
        pytest.param({"database_url": "mysql://x/y"}, "database", "not supported", id="unknown database"),
        pytest.param({"database_url": "postgresql://127.0.0.1:9/x"}, "database", "cannot be used", id="database away"),
        pytest.param({"blob_url": "ftp://x"}, "object store", "not supported", id="unknown store"),
        pytest.param({"blob_url": "file:///proc/none"}, "object store", "", id="store not writable"),
        pytest.param({"model": Path("/nowhere")}, "model", "", id="no model"),
    ],
)
def test_failed_part_is_named_with_a_fix(host: Path, settings: dict[str, Any], check: str, said: str) -> None:
    findings = {finding.check: finding for finding in check_host(HostSettings(data_dir=host, **settings))}
    assert findings[check].grade is Grade.FAILED
    assert said in findings[check].message
    assert findings[check].mend
    assert "hunter2" not in str(findings)


@pytest.mark.parametrize(
    ("statement", "fix"),
    [
        pytest.param("DELETE FROM alembic_version", "loramux db upgrade", id="no version"),
        pytest.param("UPDATE alembic_version SET version_num = '0020'", "commit db435589", id="older"),
        pytest.param("UPDATE alembic_version SET version_num = '9999'", "install that version", id="newer"),
    ],
)
def test_other_schema_is_reported_with_a_fix(host: Path, statement: str, fix: str) -> None:
    database = Database(f"sqlite:///{host / 'loramux.db'}")
    with database.write() as connection:
        connection.exec_driver_sql(statement)
    database.close()
    (finding,) = [finding for finding in check_host(HostSettings(data_dir=host)) if finding.check == "database"]
    assert finding.grade is Grade.FAILED
    assert fix in str(finding.mend)


@pytest.mark.parametrize(("free", "grade"), [(6 << 30, Grade.OK), (1 << 30, Grade.WARNING), (100 << 20, Grade.FAILED)])
def test_low_disk_space_is_reported(tmp_path: Path, free: int, grade: Grade) -> None:
    assert checks.check_disk(tmp_path / "not" / "yet", lambda _path: free).grade is grade


@pytest.mark.parametrize(
    ("running", "grade"), [((3, 10, 9), Grade.FAILED), ((3, 11, 0), Grade.OK), ((3, 14, 0), Grade.FAILED)]
)
def test_unsupported_python_fails(running: tuple[int, int, int], grade: Grade) -> None:
    assert checks.check_python(running).grade is grade


@pytest.mark.parametrize(
    ("missing", "is_required", "grade", "said"),
    [
        ((), False, Grade.OK, "with no_new_privs, network namespace, landlock, seccomp"),
        ((NETWORK,), True, Grade.OK, "seccomp denies the network too"),
        ((FILES,), False, Grade.WARNING, "missing: landlock"),
        ((FILES, CALLS), True, Grade.FAILED, "missing: landlock, seccomp"),
        (MEASURES, False, Grade.WARNING, "only limits on memory and time"),
    ],
    ids=["all", "no network namespace", "no landlock", "neither, though required", "none"],
)
def test_missing_sandbox_measures_are_reported(
    missing: tuple[str, ...], is_required: bool, grade: Grade, said: str
) -> None:
    finding = checks.check_sandbox(is_required, lambda: missing)
    assert finding.grade is grade
    assert said in finding.message
    for measure in () if grade is Grade.OK else missing:
        assert f"{measure}: {checks.SANDBOX_FIXES[measure]}" in str(finding.mend)
    assert ("LORAMUX_SANDBOX=required" in str(finding.mend)) is (grade is Grade.WARNING)


def test_sandbox_check_inspects_this_machine(host: Path) -> None:
    (finding,) = [finding for finding in check_host(HostSettings(data_dir=host)) if finding.check == "sandbox"]
    assert finding == checks.check_sandbox(False)
    assert finding.grade is (Grade.WARNING if set(missing_measures()) & set(ESSENTIAL) else Grade.OK)


def test_sandbox_that_cannot_be_tried_fails() -> None:
    def failing() -> tuple[str, ...]:
        raise ValidationFailed("the sandbox cannot be tried")

    assert checks.check_sandbox(False, failing).grade is Grade.FAILED


def test_missing_torch_is_reported() -> None:
    def nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    assert checks.check_package("torch", nothing).grade is Grade.WARNING


def test_data_directory_readable_by_others_is_reported(host: Path) -> None:
    host.chmod(0o755)
    assert checks.check_data_directory(host).mend == f"chmod 700 {host}"


def test_engine_socket_reachable_by_others_is_reported(tmp_path: Path) -> None:
    assert checks.check_engine_socket(Path("/run/loramux/none")).grade is Grade.OK
    with tempfile.TemporaryDirectory() as short:
        run = Path(short) / "run"
        run.mkdir(mode=0o755)
        assert checks.check_engine_socket(run).mend == f"chmod go= {run}"
        run.chmod(0o700)
        assert checks.check_engine_socket(run).grade is Grade.OK
        several = run / "engine-1"
        several.mkdir(mode=0o755)
        assert checks.check_engine_socket(run).mend == f"chmod go= {several}"
    deep = checks.check_engine_socket(tmp_path / ("d" * 100) / "run")
    assert (deep.grade, "d" * 100 in deep.message) == (Grade.OK, False), "a temporary directory is used instead"


def test_socket_directory_is_checked(short_path: Path) -> None:
    shared = short_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert checks.check_socket_directory(shared).grade is Grade.WARNING
    shared.chmod(0o1777)
    assert checks.check_socket_directory(shared).grade is Grade.OK
    deep = short_path / ("d" * 100)
    deep.mkdir()
    assert checks.check_socket_directory(deep).grade is Grade.FAILED
    if os.geteuid() != 0:
        shared.chmod(0o555)
        assert checks.check_socket_directory(shared).grade is Grade.FAILED


def test_database_clock_is_compared_with_the_hosts_clock(postgres_url: str) -> None:
    database = Database(postgres_url)
    database.upgrade()
    assert graded(checks.check_database(database)) == {"database": "ok", "database clock": "ok"}
    late = checks.check_database(database, host_us=lambda: doctor.time.time_ns() // 1000 + 10_000_000)  # type: ignore[attr-defined]
    assert graded(late)["database clock"] == "warning"
    database.close()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            {"avx2", "avx512f", "avx512bw", "avx512vnni", "avx512bf16", "amx-bf16", "amx-int8"},
            "bfloat16 weights with AMX; 8-bit and 4-bit weights with AMX and AVX512_VNNI, "
            "16-bit activations (8-bit for int8 and int4 with --activations int8)",
        ),
        (
            {"avx2", "avx512f", "avx512bw", "avx512bf16"},
            "bfloat16 weights with AVX512_BF16; 8-bit and 4-bit weights with AVX-512, 16-bit activations",
        ),
        (
            {"avx2", "avxvnni"},
            "bfloat16 weights with float32 arithmetic; 8-bit and 4-bit weights with AVX_VNNI, "
            "16-bit activations (8-bit for int8 and int4 with --activations int8)",
        ),
        (
            {"avx2"},
            "bfloat16 weights with float32 arithmetic; 8-bit and 4-bit weights with AVX2, "
            "16-bit activations (8-bit for int4 with --activations int8)",
        ),
        (
            {"neon", "bf16"},
            "bfloat16 weights with oneDNN; 8-bit and 4-bit weights are dequantised when they are loaded",
        ),
    ],
    ids=["amx", "avx512", "avx-vnni", "avx2", "arm"],
)
def test_instructions_of_the_cpu_are_named(features: set[str], message: str) -> None:
    finding = checks.check_cpu(features)
    assert (finding.check, finding.grade, finding.message) == ("cpu", Grade.OK, message)


def test_a_quantised_base_that_predicts_much_worse_is_a_warning_with_advice(tmp_path: Path) -> None:
    def store(name: str, content: bytes, activations: str | None = None) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / QUALITY_FILES[activations]).write_bytes(content)

    assert list(checks.check_quantized(tmp_path / "missing")) == []
    good = Quality(method="int8", divergence=0.003, perplexity=25, float_perplexity=24.7)
    store("a", msgspec.json.encode(good))
    store("b", msgspec.json.encode(msgspec.structs.replace(good, method="int4", divergence=0.41)))
    rounded = msgspec.structs.replace(good, divergence=0.2, activations="int8")
    store("b", msgspec.json.encode(rounded), "int8")
    store("c", b"not JSON")
    (tmp_path / "unmeasured").mkdir()
    first, fourth, second, third = checks.check_quantized(tmp_path)
    assert (first.grade, first.mend) == (Grade.OK, None)
    assert "perplexity of a plain text: 25 (float model: 24.7)" in first.message
    assert (second.grade, second.mend) == (Grade.WARNING, "use --quantization int8")
    assert second.message.startswith("int4 changes this model's predictions by 0.41 nats per token")
    assert (fourth.grade, fourth.mend) == (Grade.WARNING, "omit --activations")
    assert fourth.message.startswith("int8 with activations in int8 changes this model's predictions by 0.2 nats")
    assert third.grade is Grade.WARNING
    assert "delete the file" in str(third.mend)
