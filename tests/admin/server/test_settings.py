from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from loramux.adapter_store.pulling.model_name import ModelName
from loramux.admin.commands.local.serve import gateway, serve
from loramux.admin.server.settings import FLAGS, DataSettings, Settings, SettingsError, load_settings
from loramux.admin.serving.gateway_assembly import gateway_settings
from tests.demo_base import DEMO_BASE

ADAPTER = DEMO_BASE.parent / "adapters" / "pirate"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def toml(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "loramux.toml"
    path.write_text(f'model = "{model}"\nport = 1001\nadmin_port = 1002\npool_bytes = "64MiB"\n')
    return path


def test_flags_override_variables_and_variables_override_the_file(
    toml: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAMUX_ADMIN_PORT", "2002")
    monkeypatch.setenv("LORAMUX_HOST", "127.0.0.2")
    settings = load_settings(Settings, {"config": toml, "host": "127.0.0.3", "port": None})
    assert (settings.port, settings.admin_port, settings.host) == (1001, 2002, "127.0.0.3")
    assert (settings.model, settings.resolved_served_name) == (model, "tiny-model")
    assert settings.pool_bytes == 64 * 1024**2


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("67108864", 1 << 26),
        ("64MiB", 1 << 26),
        (" 64 mib\n", 1 << 26),
        ("0.5GB", 500_000_000),
        (1 << 38, 1 << 38),
        ("67_108_864", 1 << 26),
        ("+67108864", 1 << 26),
        ("64m", 64_000_000),
    ],
)
def test_size_is_a_number_of_bytes_or_has_a_unit(
    model: Path, monkeypatch: pytest.MonkeyPatch, written: str | int, num_bytes: int
) -> None:
    assert load_settings(Settings, {"model": model, "pool_bytes": written}).pool_bytes == num_bytes
    monkeypatch.setenv("LORAMUX_POOL_BYTES", str(written))
    assert load_settings(Settings, {"model": model}).pool_bytes == num_bytes


@pytest.mark.parametrize("written", ["2e+11", "2.147483648e+11", "64 MiB each", "8GiB+", "-1", "", "2 e", "2E", "1__0"])
def test_text_that_is_no_size_is_refused_in_each_place(
    model: Path, toml: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """ByteSize would read the first as 2 EB."""
    said = re.escape(f"kv_host_bytes is invalid: {written!r} is not a size")
    with pytest.raises(SettingsError, match=said):
        load_settings(Settings, {"model": model, "kv_host_bytes": written})
    toml.write_text(toml.read_text() + f'kv_host_bytes = "{written}"\n')
    with pytest.raises(SettingsError, match=said):
        load_settings(Settings, {"config": toml})
    monkeypatch.setenv("LORAMUX_KV_HOST_BYTES", written)
    with pytest.raises(SettingsError, match=said):
        load_settings(Settings, {"model": model})


def test_size_in_the_file_is_no_floating_point_number(toml: Path) -> None:
    toml.write_text(toml.read_text() + "kv_host_bytes = 2e+11\n")
    with pytest.raises(SettingsError, match=r"kv_host_bytes is invalid: 200000000000\.0 is not a size"):
        load_settings(Settings, {"config": toml})


def test_size_in_the_file_is_no_boolean(toml: Path) -> None:
    toml.write_text(toml.read_text() + "kv_host_bytes = true\n")
    with pytest.raises(SettingsError, match="kv_host_bytes is invalid: True is not a size"):
        load_settings(Settings, {"config": toml})


def test_settings_file_path_can_come_from_a_variable(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_CONFIG", str(toml))
    assert load_settings(Settings, {}).port == 1001


def test_database_and_blobs_are_in_the_data_directory_by_default(model: Path, tmp_path: Path) -> None:
    settings = load_settings(Settings, {"model": model, "data_dir": tmp_path / "data"})
    assert settings.is_database_embedded
    assert settings.resolved_database_url == f"sqlite:///{tmp_path}/data/loramux.db"
    assert settings.resolved_blob_url == f"file://{tmp_path}/data/blobs"


def test_empty_database_url_means_the_embedded_database(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAMUX_DATABASE_URL", "")
    given = {"model": model, "data_dir": tmp_path / "data"}
    for settings in (load_settings(Settings, given), load_settings(DataSettings, {"data_dir": tmp_path / "data"})):
        assert settings.is_database_embedded
        assert settings.resolved_database_url == f"sqlite:///{tmp_path}/data/loramux.db"


def test_an_empty_blob_url_means_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_BLOB_URL", "")
    assert load_settings(Settings, {"model": DEMO_BASE}).blob_url is None


def test_model_can_have_a_url(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_MODEL", "hf://acme/Base-1B@v1")
    settings = load_settings(Settings, {})
    assert (settings.model, settings.resolved_served_name) == (ModelName("hf", "acme/Base-1B", "v1"), "Base-1B")
    toml.write_text('model = "s3://bucket/bases/tiny"')
    monkeypatch.delenv("LORAMUX_MODEL")
    assert load_settings(Settings, {"config": toml}).resolved_served_name == "tiny"
    for wrong, said in (
        ("hf://acme", "does not have the form"),
        ("acme/base", "use hf://acme/base"),
        ("s3://B", "does not have the form"),
    ):
        with pytest.raises(SettingsError, match=said) as error:
            load_settings(Settings, {"model": wrong})
        assert len(str(error.value).splitlines()) == 1
    (toml.parent / "7").mkdir()
    (toml.parent / "7" / "config.json").write_text("{}")
    monkeypatch.chdir(toml.parent)
    monkeypatch.setenv("LORAMUX_MODEL", "7")
    assert load_settings(Settings, {}).model == toml.parent / "7"
    monkeypatch.delenv("LORAMUX_MODEL")
    toml.write_text("model = 3")
    with pytest.raises(SettingsError, match="neither a path nor the URL"):
        load_settings(Settings, {"config": toml})


def test_all_errors_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_PROT", "1")
    monkeypatch.setenv("LORAMUX_ADMIN_KEY", "too-short-and-secret")
    overrides = {
        "model": Path("/nowhere"),
        "port": 70_000,
        "dtype": "int3",
        "blob_url": "ftp://x",
        "database_url": "mysql://root:hunter2@db/loramux",
        "served_name": "a b",
        "max_pinned_share": 0.95,
    }
    with pytest.raises(SettingsError) as caught:
        load_settings(Settings, overrides)
    lines = str(caught.value).splitlines()
    for said in (
        "LORAMUX_PROT is not a setting: did you mean LORAMUX_PORT?",
        "there is no directory /nowhere",
        "port is invalid: it should be less than or equal to 65535, not 70000",
        "'auto', 'float32' or 'bfloat16', not 'int3'",
        "file://DIRECTORY or s3://BUCKET/PREFIX",
        "database_url is invalid: databases of kind 'mysql' are not supported: use SQLite or PostgreSQL",
        "'a b' is not a model name",
        "max_pinned_share is invalid: it should be less than or equal to 0.9",
        "32 characters",
    ):
        assert [line for line in lines if said in line], said
    assert len(lines) == 9
    assert "too-short-and-secret" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        pytest.param({"port": "eight"}, "port is invalid: it should be a valid integer, not 'eight'; ", id="number"),
        pytest.param(
            {"pool_bytes": "8 gigs"},
            "pool_bytes is invalid: it should be a size, such as 8GiB or 500MB, not '8 gigs'; ",
            id="unit",
        ),
    ],
)
def test_a_wrong_value_gets_a_sentence_that_says_what_to_write(model: Path, setting: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)):
        load_settings(Settings, {"model": model, **setting})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param("port = ", "is not TOML", id="no toml"),
        pytest.param("prot = 1", "unknown setting prot: did you mean port?", id="unknown key"),
        pytest.param("[server]\nport = 1", "unknown setting server", id="table"),
        pytest.param(None, "No such file", id="no file"),
    ],
)
def test_invalid_file_is_explained(tmp_path: Path, model: Path, content: str | None, said: str) -> None:
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=said.replace("?", r"\?")):
        load_settings(Settings, {"config": path, "model": model})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        pytest.param({}, "the setting model is missing: specify --model, LORAMUX_MODEL or model", id="no model"),
        pytest.param({"model": Path("/")}, "has no config.json", id="no model in the directory"),
        pytest.param({"model": Path("/etc/passwd")}, "/etc/passwd is a file", id="a file is not said to be missing"),
        pytest.param({"model": ADAPTER}, "it contains an adapter", id="an adapter in place of a base"),
        pytest.param({"model": Path("/"), "drain_s": float("nan")}, "drain_s", id="nan"),
        pytest.param(
            {"model": Path("/"), "tool_call_parser": "llama"},
            "tool_call_parser must be one of auto, off, functiongemma, gemma4, glm45, harmony, hermes, llama3_json",
            id="no tool call parser",
        ),
        pytest.param(
            {"model": Path("/"), "reasoning_parser": ""},
            "reasoning_parser must be one of auto, off, gemma4, harmony, mistral, seed_oss, think",
            id="no reasoning parser",
        ),
        pytest.param(
            {"model": Path("/"), "eviction_policy": "fifo"},
            "eviction_policy is invalid: 'fifo' is not one of lru, greedy_dual; change LORAMUX_EVICTION_POLICY",
            id="no eviction policy",
        ),
        pytest.param({"model": Path("/"), "router": "x"}, "router is invalid: 'x' is not one of homes", id="no router"),
        pytest.param(
            {"model": Path("/"), "key_authentication": "x"},
            "key_authentication is invalid: there is no 'x', because no extension of this kind is installed",
            id="no key authentication",
        ),
        pytest.param({"model": Path("/"), "max_sequences": 0}, "max_sequences", id="zero"),
        pytest.param({"model": Path("/"), "keep_alive_s": 0}, "keep_alive_s", id="no keep-alive"),
        *(
            pytest.param(
                {"model": Path("/"), "cors_origins": origin}, f"cors_origins is invalid: {re.escape(repr(origin))}"
            )
            for origin in ("example.com", "https://a.example/", "https://A.example", "null", "https://*.example")
        ),
    ],
)
def test_invalid_value_names_its_setting(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(Settings, overrides)


def test_origins_of_pages_are_listed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origins = ("https://app.example.com", "http://localhost:3000", "http://[::1]:80", "chrome-extension://abc", "*")
    monkeypatch.setenv("LORAMUX_CORS_ORIGINS", ", ".join(origins))
    settings = load_settings(Settings, {"model": model})
    assert (settings.cors_origins, gateway_settings(settings).cors_origins) == (origins, origins)
    monkeypatch.delenv("LORAMUX_CORS_ORIGINS")
    assert load_settings(Settings, {"model": model}).cors_origins == ()


def test_database_commands_need_no_model(toml: Path) -> None:
    settings = load_settings(DataSettings, {"config": toml, "database_url": "postgresql://h/x"})
    assert not settings.is_database_embedded


def test_flags_match_serve_and_gateway() -> None:
    flags = {name for verb in (serve, gateway) for name in inspect.signature(verb).parameters}
    assert flags - {"context"} == FLAGS


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        pytest.param({"pool_bytes": 1}, "change LORAMUX_POOL_BYTES or pool_bytes in", id="no flag"),
        pytest.param({"port": -1}, "change --port, LORAMUX_PORT or port in", id="flag"),
        pytest.param({"admin_key": "x"}, "change LORAMUX_ADMIN_KEY or admin_key in", id="secret"),
    ],
)
def test_error_names_a_flag_only_if_the_flag_exists(model: Path, overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(Settings, {"model": model, **overrides})


def test_secret_file_may_end_with_a_line_break(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_ADMIN_KEY", "k" * 32 + "\n")
    monkeypatch.setenv("LORAMUX_METRICS_TOKEN", "t" * 16 + "\r\n")
    settings = load_settings(Settings, {"model": model})
    assert settings.admin_key is not None
    assert settings.metrics_token is not None
    assert settings.admin_key.get_secret_value() == "k" * 32
    assert settings.metrics_token.get_secret_value() == "t" * 16


@pytest.mark.parametrize("secret", ["k" * 20 + "\n" + "k" * 20, "schl\u00fcssel" * 6], ids=["line break", "not ASCII"])
def test_secret_that_does_not_fit_a_header_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("LORAMUX_ADMIN_KEY", secret)
    with pytest.raises(SettingsError, match="printable ASCII") as caught:
        load_settings(Settings, {"model": model})
    assert secret not in str(caught.value)


def test_sources_can_be_a_comma_separated_string_or_a_list(
    model: Path, toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings(Settings, {"model": model}).adapter_sources == ()
    toml.write_text(toml.read_text() + 'adapter_sources = ["s3://one/adapters", "s3://two"]\n')
    assert load_settings(Settings, {"config": toml}).adapter_sources == ("s3://one/adapters", "s3://two")
    monkeypatch.setenv("LORAMUX_ADAPTER_SOURCES", "s3://three/a, s3://four")
    assert load_settings(Settings, {"config": toml}).adapter_sources == ("s3://three/a", "s3://four")
    monkeypatch.setenv("LORAMUX_ADAPTER_SOURCES", "hf://acme,hf://acme/support")
    assert load_settings(Settings, {"config": toml}).adapter_sources == ("hf://acme", "hf://acme/support")
    for wrong in (
        "file://etc",
        "file:///a/../b",
        "file:///",
        '["s3://five"]',
        "s3://six/../seven",
        "hf://",
        "hf://a/b@main",
        "hf://a/b/c",
    ):
        monkeypatch.setenv("LORAMUX_ADAPTER_SOURCES", wrong)
        with pytest.raises(SettingsError, match="not a source of adapters"):
            load_settings(Settings, {"model": model})


def test_hub_must_be_reached_safely_and_its_token_stays_hidden(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(Settings, {"model": model}).hf_endpoint == "https://huggingface.co"
    monkeypatch.setenv("LORAMUX_HF_TOKEN", "hf_secret\n")
    settings = load_settings(Settings, {"model": model})
    assert settings.hf_token is not None
    assert settings.hf_token.get_secret_value() == "hf_secret"
    assert "hf_secret" not in repr(settings)
    monkeypatch.setenv("LORAMUX_HF_TOKEN", "hf_\x07secret")
    with pytest.raises(SettingsError, match="printable ASCII") as caught:
        load_settings(Settings, {"model": model})
    assert "secret" not in str(caught.value)
    monkeypatch.delenv("LORAMUX_HF_TOKEN")
    monkeypatch.setenv("LORAMUX_HF_ENDPOINT", "http://hub.example")
    with pytest.raises(SettingsError, match="neither an https URL nor a URL of this machine"):
        load_settings(Settings, {"model": model})


def test_trusted_proxies_can_be_addresses_and_networks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(Settings, {"model": model}).trusted_proxies == ()
    monkeypatch.setenv("LORAMUX_TRUSTED_PROXIES", "127.0.0.1, 10.0.0.0/8,::1")
    assert load_settings(Settings, {"model": model}).trusted_proxies == ("127.0.0.1", "10.0.0.0/8", "::1")


@pytest.mark.parametrize("proxies", ["*", "10.0.0.1/8", "proxy.example.com"])
def test_invalid_trusted_proxies_are_refused(model: Path, proxies: str) -> None:
    with pytest.raises(SettingsError, match=r"trusted_proxies is invalid.*such as 127\.0\.0\.1 and 10\.0\.0\.0/8"):
        load_settings(Settings, {"model": model, "trusted_proxies": proxies})
