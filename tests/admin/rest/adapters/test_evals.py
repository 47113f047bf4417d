from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from loramux.adapter_store.registry.eval_claims import EvalClaims
from loramux.adapter_store.registry.evals import MAX_KEPT_EVALS, MAX_OPEN_EVALS
from loramux.adapter_store.registry.registry import MAX_VERSION
from tests.admin.admin_side import AdminSide
from tests.admin.finished_evals import CONTENT, SHA256, add_finished_eval
from tests.admin.rest.adapters.ready_versions import add_ready_versions
from tests.admin.rest.tenants_and_keys import bearer

pytestmark = pytest.mark.anyio

FILE = CONTENT.decode()
JUDGED = '{"prompt": "p", "judge": "Is it polite?"}'


@dataclass
class Stand:
    http: httpx.AsyncClient
    side: AdminSide
    adapter_id: str

    @property
    def path(self) -> str:
        return f"/admin/v1/adapters/{self.adapter_id}"

    def key(self, tenant: str, *scopes: str, **options: Any) -> dict[str, str]:
        accounts = self.side.services.accounts
        owner = accounts.tenants.get(tenant) or accounts.tenants.create(tenant)
        return bearer(accounts.api_keys.create(owner.id, "k", list(scopes), **options).secret)

    async def start(self, headers: dict[str, str] | None = None, number: int = 1, **fields: Any) -> httpx.Response:
        body = {"name": "tests.jsonl", "file": FILE, **fields}
        return await self.http.post(f"{self.path}/versions/{number}/evals", json=body, headers=headers or {})

    async def move(self, targets: dict[int, int], name: str = "default", **fields: Any) -> httpx.Response:
        weighted = [{"version": number, "weight": weight} for number, weight in targets.items()]
        return await self.http.put(f"{self.path}/aliases/{name}", json={"targets": weighted, "warm": False, **fields})


@pytest.fixture
def stand(http: httpx.AsyncClient, admin_side: AdminSide) -> Stand:
    services = admin_side.services
    tenant = services.accounts.tenants.create("acme")
    adapter = services.adapters.registry.create_adapter(tenant.id, "support")
    add_ready_versions(services.database, adapter.id, 3)
    return Stand(http, admin_side, adapter.id)


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_eval_is_queued_listed_and_cancelled(stand: Stand) -> None:
    made = await stand.start(compare=2)
    assert made.status_code == 201, made.text
    document = made.json()
    assert document == document | {
        "object": "eval",
        "model": "acme/support",
        "version": 1,
        "compare": 2,
        "name": "tests.jsonl",
        "sha256": SHA256,
        "state": "queued",
        "charged": False,
        "num_cases": 4,
        "score": None,
        "error": None,
        "created_by": "operator",
    }
    other = (await stand.start(stand.key("acme", "tenant:develop"), number=2)).json()
    assert (other["charged"], other["version"]) == (True, 2)
    listed = (await stand.http.get(f"{stand.path}/evals")).json()["data"]
    assert [one["id"] for one in listed] == [other["id"], document["id"]]
    assert (await stand.http.get(f"{stand.path}/evals", params={"version": 2})).json()["data"] == [other]
    cancelled = await stand.http.post(f"/admin/v1/evals/{document['id']}/cancel")
    assert cancelled.json()["state"] == "cancelled"
    assert (await stand.http.post(f"/admin/v1/evals/{document['id']}/cancel")).json() == cancelled.json()
    claimed = EvalClaims(stand.side.services.database).claim()
    assert claimed is not None
    assert claimed.eval.id == other["id"], "a cancelled eval does not run"


async def test_newest_finished_evals_of_versions_are_listed(stand: Stand) -> None:
    database = stand.side.services.database
    for number, passed in ((1, 1), (1, 2), (2, 3), (3, 4)):
        add_finished_eval(database, stand.adapter_id, number, passed=passed)
    await stand.start(number=2)
    listed = (await stand.http.get(f"{stand.path}/evals", params={"newest_of": [1, 2]})).json()
    assert [(one["version"], one["score"]) for one in listed["data"]] == [(2, 0.75), (1, 0.5)]
    assert listed["has_more"] is False
    for wrong in ([0], [MAX_VERSION + 1], list(range(1, 102))):
        assert (await stand.http.get(f"{stand.path}/evals", params={"newest_of": wrong})).status_code == 400
    for name, value in (("version", 2), ("after", listed["first_id"]), ("before", listed["first_id"])):
        response = await stand.http.get(f"{stand.path}/evals", params={"newest_of": 1, name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "newest_of")


async def test_answers_are_paged_by_line(stand: Stand) -> None:
    eval_id = add_finished_eval(stand.side.services.database, stand.adapter_id, 1, passed=3, compared=2, others=1)
    document = (await stand.http.get(f"/admin/v1/evals/{eval_id}")).json()
    assert (document["score"], document["num_passed"]) == (0.75, 3)
    assert (document["compare_score"], document["compare_num_passed"]) == (0.25, 1)
    path, seen, after = f"/admin/v1/evals/{eval_id}/answers", [], 0
    for more in (True, False):
        page = (await stand.http.get(path, params={"limit": 2, "after_line": after})).json()
        assert page["has_more"] is more
        seen += page["data"]
        after = seen[-1]["line"]
    assert [(one["line"], one["version"], one["passed"]) for one in seen] == [
        (line, version, line <= count) for line in range(1, 5) for version, count in ((1, 3), (2, 1))
    ]


async def test_divergence_of_a_shared_cache_is_told(stand: Stand) -> None:
    database = stand.side.services.database
    eval_id = add_finished_eval(database, stand.adapter_id, 1, passed=3, others=1, share_base_cache=256)
    document = (await stand.http.get(f"/admin/v1/evals/{eval_id}")).json()
    assert (document["share_base_cache"], document["divergence"], document["num_measured"]) == (256, 0.25, 4)
    assert (document["compare"], document["compare_score"], document["compare_num_passed"]) == (None, 0.25, 1)
    answers = (await stand.http.get(f"/admin/v1/evals/{eval_id}/answers")).json()["data"]
    assert [(one["line"], one["version"], one["shared"], one["divergence"]) for one in answers] == [
        (line, 1, is_shared, line / 10 if is_shared else None) for line in range(1, 5) for is_shared in (False, True)
    ]


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"file": "nonsense"}, 400, "invalid_line", "file[1]"),
        ({"file": "\n"}, 400, "no_cases", "file"),
        ({"file": ""}, 400, "invalid_value", "file"),
        ({"file": "x" * (2 * 1024 * 1024 + 1)}, 400, "invalid_value", "file"),
        ({"file": "é" * (1024 * 1024 + 1)}, 400, "file_too_large", "file"),
        ({"file": JUDGED}, 400, "missing_required_parameter", "judge"),
        ({"file": JUDGED, "judge": "other/secret"}, 404, "model_not_found", "model"),
        ({"file": JUDGED, "judge": "other/absent"}, 404, "model_not_found", "model"),
        ({"file": JUDGED, "judge": "acme/support@9"}, 404, "model_not_found", "model"),
        ({"compare": 1}, 400, "invalid_comparison", "compare"),
        ({"compare": 2, "share_base_cache": 4}, 400, "invalid_comparison", "share_base_cache"),
        ({"share_base_cache": 0}, 400, "invalid_value", "share_base_cache"),
        ({"compare": 9}, 404, "version_not_found", None),
        ({"compare": 0}, 400, "invalid_value", "compare"),
        ({"number": 9}, 404, "version_not_found", None),
        ({"regex": "(a+)+$"}, 400, "unknown_parameter", "regex"),
        ({"name": ""}, 400, "invalid_value", "name"),
    ],
)
async def test_bad_eval_is_refused(stand: Stand, fields: dict[str, Any], status: int, code: str, param: str) -> None:
    services = stand.side.services
    other = services.accounts.tenants.create("other")
    secret = services.adapters.registry.create_adapter(other.id, "secret")
    add_ready_versions(services.database, secret.id, 1)
    refused = await stand.start(**fields)
    assert code_of(refused) == (status, code)
    assert refused.json()["error"]["param"] == param
    assert services.adapters.evals.list(stand.adapter_id, None, 10).data == ()


async def test_foreign_judge_looks_like_an_absent_one(stand: Stand) -> None:
    services = stand.side.services
    other = services.accounts.tenants.create("other")
    add_ready_versions(services.database, services.adapters.registry.create_adapter(other.id, "secret").id, 1)
    answers = [(await stand.start(file=JUDGED, judge=f"other/{name}")).text for name in ("secret", "absent")]
    assert answers[0].replace("secret", "absent") == answers[1]
    assert (await stand.start(file=JUDGED, judge="the-base")).status_code == 201


async def test_huge_body_is_refused_before_it_is_read(stand: Stand) -> None:
    path = f"{stand.path}/versions/1/evals"
    headers = {"content-length": str(2**30), "content-type": "application/json"}
    refused = await stand.http.post(path, content=b"{", headers=headers)
    assert code_of(refused) == (413, "payload_too_large")
    bomb = gzip.compress(b" " * (64 * 1024 * 1024))
    refused = await stand.http.post(path, content=bomb, headers={"content-encoding": "gzip"})
    assert code_of(refused) == (413, "payload_too_large")
    # Only this route accepts large bodies.
    refused = await stand.http.post("/admin/v1/tenants", content=b" " * 100_000)
    assert code_of(refused) == (413, "payload_too_large")


async def test_repeated_call_queues_one_eval(stand: Stand) -> None:
    headers = {"idempotency-key": "once"}
    large = "\n".join(json.dumps({"prompt": "p" * 1000, "equal": "q"}) for _ in range(100))
    first, second = [await stand.start(headers, file=large) for _ in range(2)]
    assert (first.status_code, second.json()) == (201, first.json())
    assert second.headers["idempotent-replayed"] == "true"


async def test_names_that_may_be_secrets_are_not_kept(stand: Stand, log: list[Any]) -> None:
    names = ["sk-lmx-0000000000000000-secret.jsonl", "AKIAIOSFODNN7EXAMPLE123.jsonl", "a\u202eb.jsonl", "x" * 200]
    for name in names:
        made = await stand.start(name=name)
        assert made.json()["name"] == f"eval-{SHA256[:12]}"
        await stand.http.post(f"/admin/v1/evals/{made.json()['id']}/cancel")
    audited = (await stand.http.get("/admin/v1/audit_log")).text
    assert not any(name in text for name in names for text in (audited, str(log)))


async def test_open_evals_are_limited_and_old_ones_deleted(stand: Stand) -> None:
    database = stand.side.services.database
    ids = [add_finished_eval(database, stand.adapter_id, 1, passed=1) for _ in range(MAX_KEPT_EVALS + 1)]
    assert code_of(await stand.http.get(f"/admin/v1/evals/{ids[0]}")) == (404, "eval_not_found")
    assert (await stand.http.get(f"/admin/v1/evals/{ids[1]}")).status_code == 200
    for _ in range(MAX_OPEN_EVALS):
        assert (await stand.start()).status_code == 201
    refused = await stand.start()
    assert code_of(refused) == (429, "too_many_evals")
    assert refused.headers["retry-after"] == "60"


async def test_only_the_tenants_developers_start_evals(stand: Stand) -> None:
    eval_id = add_finished_eval(stand.side.services.database, stand.adapter_id, 1, passed=4)
    reads = [f"/admin/v1/evals/{eval_id}", f"/admin/v1/evals/{eval_id}/answers", f"{stand.path}/evals"]
    viewer, stranger = stand.key("acme", "tenant:read"), stand.key("globex", "tenant:admin")
    caller, limited = stand.key("acme", "adapters"), stand.key("acme", "tenant:develop", adapters=["support"])
    assert code_of(await stand.start(viewer)) == (403, "insufficient_scope")
    assert code_of(await stand.start(caller)) == (403, "insufficient_scope")
    assert code_of(await stand.start(stranger)) == (404, "adapter_not_found")
    assert (await stand.start(limited)).status_code == 201
    # A key that is limited to adapters may not name the base, even as a judge.
    assert code_of(await stand.start(limited, file=JUDGED, judge="the-base")) == (404, "model_not_found")
    for path in reads:
        assert (await stand.http.get(path, headers=viewer)).status_code == 200
        assert (await stand.http.get(path, headers=stranger)).status_code == 404
    hidden = await stand.http.get(reads[0], headers=stranger)
    missing = await stand.http.get(f"/admin/v1/evals/evl_{'0' * 32}", headers=stranger)
    assert hidden.text == missing.text
    assert (await stand.http.post(f"{reads[0]}/cancel", headers=stranger)).status_code == 404


async def test_alias_demands_an_eval(stand: Stand) -> None:
    database = stand.side.services.database
    demand = {"sha256": SHA256, "name": "tests.jsonl", "min_score": 0.75, "judge": None}
    refused = await stand.move({2: 100}, require_eval=demand)
    assert code_of(refused) == (409, "eval_not_passed")
    assert refused.json()["error"]["param"] == "require_eval"
    add_finished_eval(database, stand.adapter_id, 2, passed=2)
    refused = await stand.move({2: 100}, require_eval=demand)
    assert "a score of 0.500 in tests.jsonl, and the alias demands 0.750" in refused.json()["error"]["message"]
    add_finished_eval(database, stand.adapter_id, 2, passed=3)
    moved = await stand.move({1: 90, 2: 10}, require_eval=demand)
    assert (moved.status_code, moved.json()["require_eval"]) == (200, demand)
    # The alias keeps its demand. A version whose share shrinks needs no eval.
    assert code_of(await stand.move({3: 100})) == (409, "eval_not_passed")
    assert code_of(await stand.move({1: 95, 2: 5})) == (409, "eval_not_passed")
    assert (await stand.move({1: 50, 2: 50})).status_code == 200
    assert (await stand.move({2: 100})).json()["require_eval"] == demand
    # The newest eval counts.
    add_finished_eval(database, stand.adapter_id, 2, passed=0)
    assert code_of(await stand.move({2: 100}, "stable", require_eval=demand)) == (409, "eval_not_passed")
    back = await stand.http.post(f"{stand.path}/aliases/default/rollback", json={"warm": False})
    assert (back.status_code, back.json()["require_eval"]) == (200, demand)
    freed = await stand.move({3: 100}, require_eval=None)
    assert (freed.status_code, freed.json()["require_eval"]) == (200, None)


async def test_developer_cannot_end_a_demand(stand: Stand) -> None:
    developer = stand.key("acme", "tenant:develop")
    demand = {"sha256": SHA256, "name": "tests.jsonl", "min_score": 0.5}
    add_finished_eval(stand.side.services.database, stand.adapter_id, 2, passed=2)

    async def move(require_eval: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        body = {"version": 2, "warm": False, "require_eval": require_eval}
        return await stand.http.put(f"{stand.path}/aliases/stable", json=body, headers=headers or {})

    assert (await move(demand, developer)).status_code == 200
    assert (await move(demand, developer)).status_code == 200
    for weaker in (None, {**demand, "min_score": 0.1}):
        assert code_of(await move(weaker, developer)) == (403, "insufficient_scope")
    assert (await move(None)).json()["require_eval"] is None


async def test_developer_cannot_share_the_bases_cache_behind_a_demand(stand: Stand) -> None:
    """The eval measured the version without the option."""
    developer = stand.key("acme", "tenant:develop")
    demand = {"sha256": SHA256, "name": "tests.jsonl", "min_score": 0.5}
    add_finished_eval(stand.side.services.database, stand.adapter_id, 2, passed=2)

    async def move(headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"version": 2, "warm": False, **fields}
        return await stand.http.put(f"{stand.path}/aliases/stable", json=body, headers=headers or {})

    assert (await move(developer, share_base_cache=8)).status_code == 200, "there is no demand yet"
    assert (await move(require_eval=demand, share_base_cache=None)).status_code == 200
    assert code_of(await move(developer, share_base_cache=16)) == (403, "insufficient_scope")
    assert (await move(developer, share_base_cache=None)).status_code == 200
    assert (await move(share_base_cache=16)).json()["share_base_cache"] == 16
    assert code_of(await move(developer, share_base_cache=None)) == (403, "insufficient_scope")
    assert (await move(developer)).json()["share_base_cache"] == 16


async def test_eval_by_another_judge_does_not_pass(stand: Stand) -> None:
    """A developer can push an adapter that always says yes, and let it judge."""
    database, developer = stand.side.services.database, stand.key("acme", "tenant:develop")
    demand = {"sha256": SHA256, "name": "tests.jsonl", "min_score": 0.75, "judge": "the-base"}
    weaker = {"version": 2, "warm": False, "require_eval": {**demand, "judge": "acme/support@3"}}
    add_finished_eval(database, stand.adapter_id, 1, passed=4, judge="the-base")
    assert (await stand.move({1: 100}, "stable", require_eval=demand)).json()["require_eval"] == demand
    for judge in ("acme/support@3", None):
        add_finished_eval(database, stand.adapter_id, 2, passed=4, judge=judge)
        refused = await stand.move({2: 100}, "stable")
        assert code_of(refused) == (409, "eval_not_passed")
        message = f"with the judge {judge or 'none'}, and the alias demands the-base"
        assert message in refused.json()["error"]["message"]
    refused = await stand.http.put(f"{stand.path}/aliases/stable", json=weaker, headers=developer)
    assert code_of(refused) == (403, "insufficient_scope")
    add_finished_eval(database, stand.adapter_id, 2, passed=3, judge="the-base")
    assert (await stand.move({2: 100}, "stable")).status_code == 200


async def test_developer_cannot_send_requests_past_a_demand_to_an_overflow(stand: Stand) -> None:
    developer = stand.key("acme", "tenant:develop")
    demand = {"sha256": SHA256, "name": "tests.jsonl", "min_score": 0.5}
    add_finished_eval(stand.side.services.database, stand.adapter_id, 2, passed=2)

    async def move(headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"version": 2, "warm": False, **fields}
        return await stand.http.put(f"{stand.path}/aliases/stable", json=body, headers=headers or {})

    assert (await move(developer, overflow="support@3")).json()["overflow"] == "acme/support@3"
    assert (await move(require_eval=demand)).status_code == 200
    for other in ("support@1", None):
        assert code_of(await move(developer, overflow=other)) == (403, "insufficient_scope")
    assert (await move(developer, overflow="support@3")).status_code == 200
    assert (await move(overflow=None)).json()["overflow"] is None


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"require_eval": {"sha256": "x", "min_score": 0.5}}, "invalid_value"),
        ({"require_eval": {"sha256": SHA256, "min_score": 1.5}}, "invalid_value"),
        ({"require_eval": {"sha256": SHA256}}, "missing_required_parameter"),
        ({"canary": {}}, "invalid_canary"),
        ({"canary": {"max_error_rate": 1}}, "invalid_value"),
        ({"canary": {"max_first_token_s": 0}}, "invalid_value"),
        ({"canary": {"max_error_rate": 0.1, "min_requests": 0}}, "invalid_value"),
    ],
)
async def test_bad_demand_is_refused(stand: Stand, fields: dict[str, Any], code: str) -> None:
    assert code_of(await stand.move({2: 100}, **fields)) == (400, code)


async def test_canary_needs_something_to_return_to(stand: Stand) -> None:
    canary = {"max_error_rate": 0.1, "max_first_token_s": None, "min_requests": 5}
    assert code_of(await stand.move({1: 100}, canary=canary)) == (400, "invalid_canary")
    assert code_of(await stand.move({2: 100}, "new", canary=canary)) == (400, "invalid_canary")
    moved = await stand.move({1: 90, 2: 10}, canary=canary)
    assert moved.json()["canary"] == {**canary, "versions": [2], "verdict": None}
    tighter = {**canary, "max_error_rate": 0.05}
    again = await stand.move({1: 90, 2: 10}, canary=tighter)
    assert again.json()["canary"] == {**tighter, "versions": [2], "verdict": None}
    assert (await stand.move({1: 80, 2: 20})).json()["canary"] is None


async def test_purge_deletes_evals(stand: Stand) -> None:
    database = stand.side.services.database
    own = add_finished_eval(database, stand.adapter_id, 2, passed=1)
    other = add_finished_eval(database, stand.adapter_id, 3, passed=1, compared=2, others=1)
    kept = add_finished_eval(database, stand.adapter_id, 3, passed=1)
    purged = await stand.http.post(f"{stand.path}/versions/2/purge", json={"confirm": "acme/support@2"})
    assert purged.status_code == 200, purged.text
    found = [(await stand.http.get(f"/admin/v1/evals/{one}")).status_code for one in (own, other, kept)]
    assert found == [404, 404, 200]
