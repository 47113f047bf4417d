from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import HTMLResponse, JSONResponse
from typer.testing import CliRunner

from loramux.adapter_store.registry.base_servers import OwnServer
from loramux.admin.cli import app
from loramux.admin.client.batch_client import BatchClient
from loramux.admin.client.client import AdminClient, AdminError
from loramux.admin.client.openai_server import OpenAIServer
from loramux.engine.protocol.messages import DiskPageCounts, HostPageCounts
from loramux.platform.accounts.tenants import TenantChanges
from tests.adapter_store.base_tokenizer import with_tokenizer
from tests.admin.admin_side import ADMIN_KEY, AdminSide
from tests.admin.command_line import Run, invoke, printed_json
from tests.admin.metered_requests import begin_request, settle_request
from tests.admin.running_server import SharedServer


def test_documented_commands_print_documented_output(loramux: Run, make_adapter: Callable[..., Path]) -> None:
    tenant = printed_json(loramux("tenants", "create", "acme", "--json"))
    assert (tenant["id"][:4], tenant["slug"]) == ("ten_", "acme")
    key = printed_json(loramux("keys", "create", "--tenant", "acme", "--json"))
    assert (key["id"][:4], key["secret"][:7], key["scopes"]) == ("key_", "sk-lmx-", ["adapters", "base"])
    pushed = printed_json(
        loramux("adapters", "push", make_adapter(), "--tenant", "acme", "--name", "support", "--json")
    )
    assert set(pushed) == {"model", "version", "digest", "version_digest", "warnings"}
    assert (pushed["model"], pushed["version"], len(pushed["digest"])) == ("acme/support", 1, 64)
    quota = loramux("quotas", "set", "--tenant", "acme", "--metric", "tokens_per_minute", "--limit", 10000)
    assert quota.exit_code == 0
    usage = printed_json(loramux("usage", "--tenant", "acme", "--format", "json"))
    assert usage["object"] == "page"
    table = loramux("usage", "--tenant", "acme", "--format", "csv")
    assert table.stdout.startswith("start_time,end_time,tenant,model,requests")


def test_lists_are_tables_or_json(loramux: Run, make_adapter: Callable[..., Path]) -> None:
    loramux("tenants", "create", "acme", "--display-name", "[bold]Acme[/bold]")
    loramux("keys", "create", "--tenant", "acme", "--name", "ci")
    loramux("adapters", "push", make_adapter(), "--tenant", "acme", "--name", "support")
    loramux("quotas", "set", "--tenant", "acme", "--metric", "concurrent_requests", "--limit", 3)
    lists = {
        "tenants": (("tenants", "list"), "[bold]Acme[/bold]"),
        "keys": (("keys", "list", "--tenant", "acme"), "ci"),
        "adapters": (("adapters", "list"), "default=1"),
        "quotas": (("quotas", "list", "--tenant", "acme"), "concurrent_requests"),
    }
    for arguments, shown in lists.values():
        table = loramux(*arguments)
        assert table.exit_code == 0, table.output
        assert shown in table.stdout
        assert printed_json(loramux(*arguments, "--json"))["object"] in ("list", "page")


def test_version_is_promoted_gradually_and_rolled_back(loramux: Run, make_adapter: Callable[..., Path]) -> None:
    loramux("tenants", "create", "acme")
    push = ("--tenant", "acme", "--name", "support")
    assert "promote" not in loramux("adapters", "push", make_adapter(), *push).stdout
    assert "loramux adapters promote acme/support@2" in loramux("adapters", "push", make_adapter(), *push).stdout
    part = loramux("adapters", "promote", "acme/support@2", "--percent", 10)
    assert part.stdout == "acme/support: default is now 1(90%)+2(10%) (revision 2)\n", part.output
    more = printed_json(loramux("adapters", "promote", "acme/support@2", "--percent", 50, "--json"))
    assert [(target["version"], target["weight"]) for target in more["targets"]] == [(1, 5000), (2, 5000)]
    assert "default is now 2 (" in loramux("adapters", "promote", "acme/support@2").stdout
    assert "1(50%)+2(50%)" in loramux("adapters", "rollback", "acme/support").stdout
    assert "default is now 1 (" in loramux("adapters", "rollback", "acme/support", "--revision", 1).stdout
    assert loramux("adapters", "promote", "acme/support@2", "--alias", "beta").exit_code == 0
    assert "beta" in loramux("aliases", "list", "acme/support").stdout
    history = loramux("aliases", "history", "acme/support").stdout
    assert re.search(r"6 +1 +rollback", history), history
    shown = loramux("adapters", "show", "acme/support").stdout
    assert re.search(r"2 +ready +beta ", shown), shown
    one = printed_json(loramux("adapters", "show", "acme/support@2", "--json"))
    assert (one["number"], one["state"]) == (2, "ready")
    assert "report max_rank" in loramux("adapters", "show", "acme/support@2").stdout
    assert loramux("aliases", "delete", "acme/support", "--alias", "beta").exit_code == 0
    assert loramux("adapters", "archive", "acme/support@2").stdout == "acme/support@2 is archived\n"
    refused = loramux("adapters", "promote", "acme/support@2", "--json")
    assert (refused.exit_code, json.loads(refused.stdout)["error"]["code"]) == (1, "version_not_ready")
    assert loramux("adapters", "restore", "acme/support@2").stdout == "acme/support@2 is ready\n"
    assert loramux("adapters", "disable", "acme/support").stdout == "acme/support is disabled\n"
    assert loramux("adapters", "enable", "acme/support").stdout == "acme/support is active\n"


def test_adapter_grant_is_added_and_removed(loramux: Run, make_adapter: Callable[..., Path]) -> None:
    for slug in ("acme", "guest"):
        loramux("tenants", "create", slug)
    loramux("adapters", "push", make_adapter(), "--tenant", "acme", "--name", "support")
    grant = ("acme/support", "--tenant", "guest")
    assert printed_json(loramux("grants", "add", *grant, "--json"))["tenant"] == "guest"
    assert "guest may call acme/support" in loramux("grants", "add", *grant).stdout
    assert "guest" in loramux("grants", "list", "acme/support").stdout
    assert loramux("grants", "remove", *grant).exit_code == 0
    assert printed_json(loramux("grants", "list", "acme/support", "--json"))["data"] == []
    mistyped = loramux("grants", "list", "acme/suport")
    assert (mistyped.exit_code, "did you mean support?" in mistyped.stderr) == (1, True)


def test_preloaded_version_appears_in_residency_and_jobs(
    loramux: Run, make_adapter: Callable[..., Path], admin_side: AdminSide
) -> None:
    loramux("tenants", "create", "acme")
    pushed = printed_json(
        loramux("adapters", "push", make_adapter(), "--tenant", "acme", "--name", "support", "--json")
    )
    assert "acme/support@1 is resident" in loramux("adapters", "preload", "acme/support@1").stdout
    assert printed_json(loramux("adapters", "pin", "acme/support@1", "--json"))["pinned"] is True
    shown = loramux("residency").stdout
    assert re.search(rf"acme/support@1 .* yes .*{pushed['digest'][:12]}", shown), shown
    assert "pages are free" in shown
    assert "main memory" not in shown
    assert "on disk" not in shown
    admin_side.engine.figures["host_pages"] = HostPageCounts(num_slots=9, num_pages=8)
    assert "8 of 9 pages in main memory contain evicted prefixes" in loramux("residency").stdout
    admin_side.engine.figures["disk_pages"] = DiskPageCounts(num_slots=7, num_pages=6)
    assert "6 of 7 pages on disk contain evicted prefixes" in loramux("residency").stdout
    assert loramux("residency", "--tier", "disk").exit_code == 0
    assert "does not share requests" in loramux("replicas").stdout
    assert "validated" in loramux("bases", "list").stdout
    unknown = loramux("bases", "rejected", "cafe")
    assert (unknown.exit_code, "no base has" in unknown.stderr) == (1, True)
    admin_side.services.adapters.bases.register("a" * 64, "llama")
    assert "aaaaaaaaaaaaaaaa: 0 versions wait" in loramux("bases", "revalidate", "aaaa").stdout
    own = OwnServer(admin_side.services.database, "a" * 64, "llama", "this-host:8000")
    own.report(is_draining=False)
    assert "this-host:8000 (serving)" in loramux("bases", "list").stdout
    refused = loramux("bases", "forget", "aaaa", "--json")
    assert (refused.exit_code, json.loads(refused.stdout)["error"]["code"]) == (1, "base_in_use")
    own.leave()
    for base in "ab":
        admin_side.services.adapters.bases.register(base * 64, "llama", "f" * 64)
    divided = "requests are divided: aaaaaaaaaaaaaaaa 75 %, bbbbbbbbbbbbbbbb 25 %\n"
    set_weights = loramux("bases", "weight", "aaa=75", "b=25")
    assert (set_weights.stdout, set_weights.stderr.count("has no effect yet")) == (divided, 2)
    assert loramux("bases", "weight", "a=1", "b=x").exit_code == loramux("bases", "weight").exit_code == 2
    refused = loramux("bases", "weight", "a=0", "b=0")
    assert (refused.exit_code, "must be above 0" in refused.stderr) == (1, True)
    assert "only on its own base" in loramux("bases", "weight", "--clear").stdout
    assert loramux("bases", "forget", "aaaa").stdout == "forgot base aaaaaaaaaaaaaaaa\n"
    alone = loramux("residency", "--all")
    assert (alone.exit_code, "--peer-address" in alone.stderr) == (1, True)
    assert json.loads(loramux("residency", "--all", "--json").stdout)["error"]["code"] == "replica_not_found"
    assert printed_json(loramux("residency", "--tenant", "acme", "--json"))["data"][0]["is_pinned"] is True
    assert printed_json(loramux("adapters", "unpin", "acme/support@1", "--json"))["pinned"] is False
    assert printed_json(loramux("jobs", "list", "--json"))["data"] == []
    (job,) = printed_json(loramux("jobs", "list", "--tenant", "acme", "--state", "succeeded", "--json"))["data"]
    assert "acme/support@1" in loramux("jobs", "list", "--state", "succeeded").stdout
    assert "acme/support@1" in loramux("jobs", "show", job["id"]).stdout
    loramux("adapters", "disable", "acme/support")
    assert loramux("adapters", "unpin", "acme/support@1").stdout == "acme/support@1 is absent\n"


def test_requests_in_flight_are_listed_and_cancelled(loramux: Run, admin_side: Any) -> None:
    tenant = printed_json(loramux("tenants", "create", "acme", "--json"))
    key = printed_json(loramux("keys", "create", "--tenant", "acme", "--json"))
    request_id = begin_request(admin_side, tenant["id"], key["id"], "acme/support@1", 12)
    (listed,) = printed_json(loramux("requests", "list", "--json"))["data"]
    assert (listed["id"], listed["prompt_tokens"]) == (request_id, 12)
    assert request_id in loramux("requests", "list", "--tenant", "acme").stdout
    assert loramux("requests", "cancel", request_id).stdout == f"{request_id} is cancelling\n"
    refused = loramux("requests", "cancel", "req_1", "--json")
    assert (refused.exit_code, json.loads(refused.stdout)["error"]["code"]) == (1, "request_not_found")


def test_pushed_version_can_be_pulled(loramux: Run, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    loramux("tenants", "create", "acme")
    first, second, place = make_adapter(), make_adapter(), tmp_path / "deep" / "pulled"
    for directory in (first, second):
        assert loramux("adapters", "push", directory, "--tenant", "acme", "--name", "support").exit_code == 0

    def files(directory: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in directory.iterdir()}

    assert loramux("adapters", "pull", "acme/support@2", place).stdout == f"acme/support@2 is in {place}\n"
    assert files(place) == files(second)
    kept = loramux("adapters", "pull", "acme/support", place)
    assert (kept.exit_code, "--force" in kept.stderr) == (1, True)
    assert files(place) == files(second)
    assert printed_json(loramux("adapters", "pull", "acme/support", place, "--force", "--json"))["version"] == 1
    assert files(place) == files(first)
    unknown = loramux("adapters", "pull", "acme/support@9", tmp_path / "none")
    assert (unknown.exit_code, (tmp_path / "none").exists()) == (1, False)


def test_optional_files_are_pushed_shown_and_pulled(
    loramux: Run, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    loramux("tenants", "create", "acme")
    directory, place = make_adapter(), tmp_path / "pulled"
    own = {"chat_template.jinja": "{{ messages }}", "generation_config.json": '{"temperature": 0.5}'}
    for name, text in own.items():
        (directory / name).write_text(text)
    push = ("adapters", "push", directory, "--tenant", "acme", "--name", "support", "--json")
    pushed = printed_json(loramux(*push))
    plain = printed_json(loramux(*push, "--no-template", "--no-generation-config"))
    assert printed_json(loramux(*push)) == pushed, "identical files return the existing version"
    assert plain["digest"] == plain["version_digest"] == pushed["digest"] != pushed["version_digest"]
    assert printed_json(loramux(*push, "--no-template"))["version"] == 3
    shown = loramux("adapters", "show", "acme/support").stdout
    assert re.search(rf"{pushed['version_digest'][:12]} +template settings", shown), shown
    assert re.search(r"temperature +0.5", loramux("adapters", "show", "acme/support@1").stdout)
    assert loramux("adapters", "pull", "acme/support@1", place).exit_code == 0
    assert {path.name: path.read_bytes() for path in place.iterdir()} == {
        path.name: path.read_bytes() for path in directory.iterdir()
    }
    assert loramux("adapters", "pull", "acme/support@2", place, "--force").exit_code == 0
    assert not any((place / name).exists() for name in own), "files of another version are deleted"


def test_facts_of_a_tokenizer_and_warnings_are_shown(loramux: Run, make_adapter: Callable[..., Path]) -> None:
    loramux("tenants", "create", "acme")
    directory = with_tokenizer(make_adapter(), {"<|tool|>": 4}, eos_token="<|reserved_1|>")
    (directory / "generation_config.json").write_text('{"stop_strings": ["x"], "eos_token_id": 5}')
    pushed = loramux("adapters", "push", directory, "--tenant", "acme", "--name", "support").stderr
    assert re.search(r"^warning: .*generation_config.json.* \(1: stop_strings\)$", pushed, re.MULTILINE), pushed
    assert "settings tokens" in loramux("adapters", "show", "acme/support").stdout
    shown = loramux("adapters", "show", "acme/support@1").stdout
    assert re.search(r'renamed_tokens +4="<\|tool\|>"', shown), shown
    assert re.search(r'special_tokens eos_token +"<\|reserved_1\|>"', shown)
    assert re.search(r"generation_config eos_token_id +\[5\]", shown)


def test_parsers_are_pushed_shown_and_pulled(loramux: Run, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    loramux("tenants", "create", "acme")
    directory, place = make_adapter(), tmp_path / "pulled"
    push = ("adapters", "push", directory, "--tenant", "acme", "--name", "support", "--json")
    plain = printed_json(loramux(*push))
    chosen = printed_json(loramux(*push, "--tool-parser", "hermes", "--reasoning-parser", "off"))
    assert (chosen["version"], chosen["digest"]) == (2, plain["digest"])
    assert chosen["version_digest"] != plain["version_digest"]
    assert re.search(rf"{chosen['version_digest'][:12]} +parsers", loramux("adapters", "show", "acme/support").stdout)
    shown = loramux("adapters", "show", "acme/support@2").stdout
    assert re.search(r"tool_call_parser +hermes", shown)
    assert re.search(r"reasoning_parser +off", shown)
    assert loramux("adapters", "pull", "acme/support@2", place).exit_code == 0
    again = ("adapters", "push", place, "--tenant", "acme", "--name", "support", "--json")
    assert printed_json(loramux(*again)) == chosen, "a pulled version is the same version"
    other = printed_json(loramux(*again, "--tool-parser", "off"))
    assert other["version"] == 3
    document = printed_json(loramux("adapters", "show", "acme/support@3", "--json"))
    assert (document["tool_call_parser"], document["reasoning_parser"]) == ("off", "off")
    unknown = loramux(*push, "--tool-parser", "llama")
    assert unknown.exit_code == 2
    assert "auto, off, functiongemma" in " ".join(unknown.stderr.replace("│", " ").split())
    assert printed_json(loramux(*push)) == plain, "nothing was uploaded"
    remote = loramux("adapters", "push", "s3://bucket/one", "--tenant", "acme", "--name", "support", "--no-template")
    assert (remote.exit_code, "reads all files" in remote.stderr) == (2, True)


@pytest.mark.parametrize(
    "name", ["support", "acme/support", "acme/support@0", "acme/support@x", "acme//x@1", "a/b@1@2"]
)
def test_version_must_be_named_in_full(loramux: Run, name: str) -> None:
    refused = loramux("adapters", "archive", name)
    assert (refused.exit_code, "tenant/adapter@version" in refused.stderr) == (2, True)


def test_usage_table_has_a_column_for_each_group(loramux: Run, admin_side: Any) -> None:
    tenant = printed_json(loramux("tenants", "create", "acme", "--json"))
    key = printed_json(loramux("keys", "create", "--tenant", "acme", "--json"))
    settle_request(admin_side, tenant["id"], key["id"], "acme/support@1", 1234, 77)
    table = loramux("usage").stdout
    assert re.search(r"acme +acme/support@1 +1 +1234 +0 +77", table), table
    table = loramux("usage", "--group-by", "endpoint", "--group-by", "key", "--bucket", "1h").stdout
    assert re.search(rf"completions +default \(key_…{key['id'][-6:]}\) +1 +1234", table), table
    report = printed_json(loramux("usage", "--json"))
    assert report["data"][0]["results"][0]["completion_tokens"] == 77
    refused = loramux("usage", "--group-by", "nonsense")
    assert (refused.exit_code, "group_by takes" in refused.stderr) == (1, True)


def test_a_list_shows_every_page(loramux: Run, admin_side: Any) -> None:
    for number in range(120):
        admin_side.services.accounts.tenants.create(f"tenant-{number}")
    assert len(printed_json(loramux("tenants", "list", "--json"))["data"]) == 120


def test_push_of_rejected_adapter_exits_with_1_and_its_error(loramux: Run, make_adapter: Callable[..., Path]) -> None:
    loramux("tenants", "create", "acme")
    push = ("adapters", "push", make_adapter(poison=float("inf")), "--tenant", "acme", "--name", "support")
    refused = loramux(*push, "--json")
    assert refused.exit_code == 1
    error = json.loads(refused.stdout)["error"]
    assert set(error) == {"message", "code", "param"}
    spoken = loramux(*push)
    assert (spoken.exit_code, spoken.stdout) == (1, "")
    assert error["code"] in spoken.stderr
    assert error["param"] in spoken.stderr


def test_push_names_the_key_that_is_at_fault(loramux: Run, make_adapter: Callable[..., Path]) -> None:
    loramux("tenants", "create", "acme")
    directory = make_adapter(config={"lora_alpha": None, "kasa_config": {"beta": 1}})
    refused = loramux("adapters", "push", directory, "--tenant", "acme", "--name", "support")
    assert "kasa_config" in refused.stderr
    nobody = loramux("adapters", "push", directory, "--tenant", "nobody", "--name", "support")
    assert (nobody.exit_code, "there is no tenant 'nobody'" in nobody.stderr) == (1, True)
    assert "loramux tenants create" in nobody.stderr


@pytest.mark.parametrize(
    ("files", "code"),
    [
        pytest.param({"adapter_config.json": b"{}", "adapter_model.bin": b"\x80"}, "pickle_refused", id="pickle"),
        pytest.param({"adapter_config.json": b"{}"}, "file_missing", id="no weights"),
        pytest.param({"adapter_model.safetensors": b"x"}, "file_missing", id="no config"),
    ],
)
def test_push_of_invalid_directory_sends_nothing(
    loramux: Run, tmp_path: Path, files: dict[str, bytes], code: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    result = loramux("adapters", "push", tmp_path, "--tenant", "nobody", "--name", "support", "--json")
    assert (result.exit_code, json.loads(result.stdout)["error"]["code"]) == (1, code)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        pytest.param(("keys", "create"), 2, "--tenant", id="whose key"),
        pytest.param(
            ("keys", "create", "--tenant", "nobody"),
            1,
            "there is no tenant 'nobody': loramux tenants list shows all tenants, and loramux tenants create adds one",
            id="unknown tenant",
        ),
        pytest.param(("keys", "revoke", "key_1"), 1, "no such API key", id="unknown key"),
        pytest.param(("tenants", "create", "A"), 1, "slug", id="bad slug"),
        pytest.param(("adapters", "push", "/nowhere", "--tenant", "a", "--name", "b"), 2, "nowhere", id="no directory"),
        pytest.param(("usage", "--format", "xml"), 2, "xml", id="bad format"),
        pytest.param(
            ("quotas", "set", "--tenant", "nobody", "--metric", "x", "--limit", "1"),
            1,
            "no tenant 'nobody'",
            id="quota",
        ),
    ],
)
def test_errors_have_an_exit_code_and_one_sentence(
    loramux: Run, arguments: tuple[str, ...], exit_code: int, said: str
) -> None:
    result = loramux(*arguments)
    assert result.exit_code == exit_code
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_revoked_key_is_listed_as_revoked(loramux: Run) -> None:
    loramux("tenants", "create", "acme")
    key = printed_json(loramux("keys", "create", "--tenant", "acme", "--scope", "base", "--json"))
    assert key["scopes"] == ["base"]
    assert loramux("keys", "revoke", key["id"]).exit_code == 0
    (listed,) = printed_json(loramux("keys", "list", "--tenant", "acme", "--json"))["data"]
    assert listed["revoked_at"] is not None
    assert "secret" not in listed


@pytest.mark.parametrize(
    ("variables", "exit_code", "said"),
    [
        pytest.param({"LORAMUX_ADMIN_KEY": ""}, 3, "LORAMUX_ADMIN_KEY", id="no key"),
        pytest.param({"LORAMUX_ADMIN_KEY": "wrong"}, 1, "unknown, expired or revoked", id="wrong key"),
        pytest.param({"LORAMUX_ADMIN_URL": "http://127.0.0.1:9"}, 3, "loramux serve", id="nobody there"),
        pytest.param({"LORAMUX_ADMIN_URL": "localhost:8001"}, 3, "should look like", id="no url"),
        pytest.param({"LORAMUX_ADMIN_URL": "http://localhost:80a"}, 3, "should look like", id="bad port"),
        pytest.param({"LORAMUX_ADMIN_URL": "http://localhost:99999"}, 3, "should look like", id="no port"),
        pytest.param({"LORAMUX_ADMIN_URL": "http://[::1"}, 3, "should look like", id="bad address"),
        pytest.param({"LORAMUX_ADMIN_URL": "http://a\x01b"}, 3, "should look like", id="control character"),
        pytest.param({"LORAMUX_ADMIN_KEY": "secret\nkey"}, 3, "printable ASCII", id="key of two lines"),
        pytest.param({"LORAMUX_ADMIN_KEY": "secret-k\u00e9y"}, 3, "printable ASCII", id="key not ASCII"),
    ],
)
def test_unusable_server_is_explained(
    loramux: Run, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], exit_code: int, said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = loramux("tenants", "list")
    assert (result.exit_code, said in result.stderr) == (exit_code, True), result.output
    assert "secret" not in result.output


def test_key_file_may_end_with_a_line_break(loramux: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_ADMIN_KEY", ADMIN_KEY + "\n")
    assert printed_json(loramux("tenants", "list", "--json"))["data"] == []


def test_tenant_is_changed_suspended_and_deleted(loramux: Run) -> None:
    loramux("tenants", "create", "acme", "--timezone", "Europe/Berlin")
    assert printed_json(loramux("tenants", "show", "acme", "--json"))["timezone"] == "Europe/Berlin"
    changed = loramux("tenants", "set", "acme", "--weight", 3, "--display-name", "Acme Ltd")
    assert changed.stdout == "acme: Acme Ltd, weight 3, Europe/Berlin\n"
    stored = loramux("tenants", "set", "acme", "--response-days", 30)
    assert stored.stdout == "acme: Acme Ltd, weight 3, Europe/Berlin, answers stored for 30 days\n"
    assert re.search(r"response_days +30", loramux("tenants", "show", "acme").stdout)
    tiers = loramux("tenants", "set", "acme", "--max-service-tier", "priority", "--response-days", 0)
    assert tiers.stdout.endswith("Berlin, service tier default by default, priority at best\n")
    assert loramux("tenants", "set", "acme", "--default-service-tier", "gold").exit_code == 1
    kept = loramux("tenants", "set", "acme", "--host-floor-bytes", 1024)
    assert ", 1024 bytes of adapters kept in the host tier" in kept.stdout
    options = loramux("tenants", "set", "--help").stdout
    fields = {field.name for field in dataclasses.fields(TenantChanges)} - {"state"}
    assert [name for name in fields if f"--{name.replace('_', '-')}" not in options] == []
    assert "acme is suspended" in loramux("tenants", "suspend", "acme").stdout
    assert re.search(r"state +suspended", loramux("tenants", "show", "acme").stdout)
    assert loramux("tenants", "resume", "acme").stdout == "acme is active\n"
    assert loramux("tenants", "set", "acme").exit_code == 2
    assert loramux("tenants", "delete", "acme").exit_code == 0
    assert loramux("tenants", "show", "acme").exit_code == 1


def test_a_key_is_limited_rotated_and_renamed(loramux: Run, make_adapter: Callable[..., Path]) -> None:
    loramux("tenants", "create", "acme")
    loramux("adapters", "push", make_adapter(), "--tenant", "acme", "--name", "support")
    key = printed_json(loramux("keys", "create", "--tenant", "acme", "--adapter", "support", "--json"))
    assert len(key["adapters"]) == 1
    rotated = loramux("keys", "rotate", key["id"], "--grace-hours", 1)
    assert (rotated.exit_code, rotated.stdout.startswith("sk-lmx-")) == (0, True)
    assert rotated.stdout.strip() != key["secret"]
    assert "old secret is valid until 2" in rotated.stderr
    again = loramux("keys", "rotate", key["id"], "--keep-previous")
    assert again.exit_code == 0, again.output
    assert rotated.stderr == again.stderr, "the old secret keeps its grace period"
    assert rotated.stdout != again.stdout
    assert loramux("keys", "rotate", key["id"], "--keep-previous", "--grace-hours", 1).exit_code == 2
    changed = printed_json(loramux("keys", "set", key["id"], "--name", "ci", "--any-adapter", "--json"))
    assert (changed["name"], changed["adapters"]) == ("ci", None)
    assert "scopes base" in loramux("keys", "set", key["id"], "--scope", "base").stdout
    changed = printed_json(loramux("keys", "set", key["id"], "--default-service-tier", "flex", "--json"))
    assert (changed["max_service_tier"], changed["default_service_tier"]) == (None, "flex")
    assert loramux("keys", "set", key["id"]).exit_code == 2


def test_push_prints_model_name_with_tenant_slug(loramux: Run, make_adapter: Callable[..., Path]) -> None:
    tenant = printed_json(loramux("tenants", "create", "acme", "--json"))
    pushed = printed_json(
        loramux("adapters", "push", make_adapter(), "--tenant", tenant["id"], "--name", "x", "--json")
    )
    assert pushed["model"] == "acme/x"


def test_help_imports_no_heavy_modules() -> None:
    heavy = ("torch", "fastapi", "sqlalchemy", "httpx", "pydantic", "numpy", "openai")
    code = f"import sys, loramux.admin.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ".src"}
    )
    assert done.stdout.strip() == "[]"


def test_db_commands_check_and_upgrade_the_database(tmp_path: Path) -> None:
    runner = CliRunner()
    new = runner.invoke(app, ["db", "check", "--data-dir", str(tmp_path / "data")])
    assert new.exit_code == 1
    assert "there is no database" in new.stderr
    assert "loramux db upgrade" in new.stderr
    assert list(tmp_path.iterdir()) == []
    for verb in ("upgrade", "check", "upgrade"):
        assert runner.invoke(app, ["db", verb, "--data-dir", str(tmp_path / "data")]).exit_code == 0
    wrong = runner.invoke(app, ["db", "check", "--database-url", "mysql://localhost/x"])
    assert (wrong.exit_code, "not supported" in wrong.stderr) == (2, True)
    (tmp_path / "file").touch()
    taken = runner.invoke(app, ["db", "upgrade", "--data-dir", str(tmp_path / "file")])
    assert (taken.exit_code, taken.stderr) == (
        2,
        f"loramux: the data directory {tmp_path / 'file'} cannot be used: File exists\n",
    )


def test_a_command_without_its_group_is_refused_with_the_whole_command() -> None:
    push = invoke("push", "s3://bucket/adapter")
    assert push.exit_code == 2
    assert "No such command 'push'. Did you mean 'adapters push'?" in push.stderr
    assert "'keys list', 'adapters list'" in " ".join(invoke("list").stderr.replace("│", " ").split())


@pytest.mark.parametrize("given", [["--max-model-len", "4096"], ["--max-model-len=4096"]])
def test_an_option_for_a_setting_without_one_is_refused_with_its_variable(given: list[str]) -> None:
    for command in ("serve", "gateway"):
        refused = invoke(command, "--model", "base", *given)
        assert refused.exit_code == 2
        said = " ".join(refused.stderr.replace("│", " ").split())
        assert "No such option: --max-model-len. Set LORAMUX_MAX_MODEL_LEN, or max_model_len in the file" in said
        helped = invoke(command, *given, "--help")
        assert (helped.exit_code, f" {command} [OPTIONS]" in helped.stdout) == (0, True)
    assert "LORAMUX_" not in invoke("serve", "--enable-lora").stderr


@pytest.mark.parametrize("typed", ["serve --max-model-len 5 --mod", "push --"])
def test_completion_refuses_no_words(typed: str) -> None:
    words = {"COMP_WORDS": f"loramux {typed}", "COMP_CWORD": str(len(typed.split()))}
    completed = invoke(env={"_LORAMUX_COMPLETE": "complete_bash", **words}, prog_name="loramux")
    assert (completed.exit_code, completed.stderr) == (0, "")
    assert completed.stdout.startswith("--")


def test_the_address_of_another_listener_is_recognised(shared_server: SharedServer) -> None:
    nothing = {"error": {"message": "there is nothing at this path", "code": "not_found", "param": None}}
    for answer in (JSONResponse(nothing, 404), HTMLResponse("<p>Not found", 404)):
        shared_server.app = answer
        with AdminClient(shared_server.url, ADMIN_KEY) as client, pytest.raises(AdminError) as refused:
            client.get("tenants")
        told = refused.value
        assert (told.status, told.code in (None, "not_found")) == (404, True)
        assert told.message.startswith(f"{shared_server.url} does not have this part of the admin API: LORAMUX_ADMIN_")
        server = OpenAIServer(url=f"{shared_server.url}/v1", key="sk-x")
        with BatchClient(server) as batches, pytest.raises(AdminError) as refused:
            batches.get("bat_1")
        assert "admin API" not in refused.value.message


def test_odd_arguments_are_refused_without_a_traceback() -> None:
    for command in (("check", "x" * 300), ("adapters", "push", "x" * 300, "--tenant", "a", "--name", "b")):
        assert invoke(*command).exit_code == 2
    assert invoke("audit", "--limit", 10**20).exit_code == 2
