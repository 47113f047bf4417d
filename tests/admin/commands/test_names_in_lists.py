from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loramux.platform.accounts.names import names_of
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.ledger.settlement import Settlement
from tests.admin.admin_side import AdminSide
from tests.admin.command_line import printed_json

BARE = re.compile(r"\b(?:ten|ada|adv)_[0-9a-f]{32}")


def test_lists_name_tenants_adapters_and_versions(
    loramux: Callable[..., Any], admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    tenant = printed_json(loramux("tenants", "create", "acme", "--json"))
    loramux("adapters", "push", make_adapter(), "--tenant", "acme", "--name", "support")
    key = printed_json(loramux("keys", "create", "--tenant", "acme", "--name", "ci", "--adapter", "support", "--json"))
    adapter = admin_side.services.adapters.registry.find_adapter(tenant["id"], "support")
    assert adapter is not None
    version = admin_side.services.adapters.registry.get_version(adapter.id, 1)
    assert version is not None
    for whom in (("--tenant", "acme"), ("--key", key["id"]), ("--adapter", adapter.id)):
        assert loramux("quotas", "set", *whom, "--metric", "tokens_per_day", "--limit", "1000").exit_code == 0
    price = ("prices", "add", "--prompt", "1", "--completion", "2")
    assert "acme/support" in loramux(*price, "--tenant", "acme", "--scope", adapter.id).stdout
    Admission(admin_side.services.database).reserve(
        ReservationRequest(
            request_id="req_1",
            tenant_id=tenant["id"],
            api_key_id=key["id"],
            model="acme/support@1",
            adapter_version_id=version.id,
            endpoint="completions",
            prompt_tokens=1,
            reserved_tokens=2,
        )
    )
    settlement = Settlement(status="completed", prompt_tokens=1, completion_tokens=1)
    Admission(admin_side.services.database).settle("req_1", settlement)
    ci = f"ci (key_…{key['id'][-6:]})"
    for command, *named in (
        ("quotas list", "acme", "acme/support", ci),
        ("prices list", "acme", "acme/support"),
        ("keys list --tenant acme", "acme", "acme/support"),
        ("usage --group-by tenant,adapter,version,key", "acme", "acme/support", "acme/support@1", ci),
        ("costs --group-by version", "acme/support@1"),
        ("audit --action adapter.*", "acme/support"),
        ("audit --action version.*", "acme/support@1"),
        ("audit --action alias.*", "acme/support:default"),
        ("aliases history acme/support", "system"),
    ):
        shown = loramux(*command.split())
        assert shown.exit_code == 0, shown.output
        lines = "\n".join(line for line in shown.stdout.splitlines())
        columns = re.sub(r"\{.*|: .*", "", lines)
        assert BARE.search(columns) is None, (command, lines)
        for name in named:
            assert re.search(rf"(?<![\w/]){re.escape(name)}(?![\w/@:])", lines), (command, name, lines)
    described = printed_json(loramux("keys", "set", key["id"], "--name", "cd", "--json"))
    assert (described["tenant"], described["adapter_names"]) == ("acme", ["acme/support"])


def test_names_are_limited_to_what_a_tenant_may_know(admin_side: AdminSide) -> None:
    services = admin_side.services
    acme, other = services.accounts.tenants.create("acme"), services.accounts.tenants.create("other")
    own, secret, granted = (
        services.adapters.registry.create_adapter(tenant.id, name)
        for tenant, name in ((acme, "own"), (other, "secret"), (other, "granted"))
    )
    services.adapters.grants.add(granted, acme.id)
    key = services.accounts.api_keys.create(other.id, "theirs").key
    ids = [acme.id, other.id, own.id, secret.id, granted.id, key.id, "operator", None, "ada_unknown"]
    everything = names_of(services.database, ids)
    assert everything[secret.id] == "other/secret"
    assert everything[key.id] == f"theirs (key_…{key.id[-6:]})"
    assert names_of(services.database, ids, acme.id) == {
        acme.id: "acme",
        own.id: "acme/own",
        granted.id: "other/granted",
    }
