"""`loramux run` and `loramux batches` against a server's OpenAI API."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update

from loramux.admin.client.batch_client import BatchClient
from loramux.admin.client.client import AdminError, ServerUnreachable
from loramux.migrations.schema import batches
from loramux.platform.batches.batch_claims import BatchQueue, StoredAnswer
from loramux.platform.batches.batch_rows import BatchError
from loramux.platform.batches.input_lines import InputLine
from loramux.platform.batches.services import BatchServices
from loramux.platform.batches.tenant_files import Owner, TenantFile
from loramux.platform.listener.app import create_openai_app
from tests.admin.added_batches import add_batch
from tests.admin.admin_side import AdminSide
from tests.admin.command_line import Run, invoke, printed_json
from tests.admin.failing_calls import fail_first
from tests.admin.openai_side import open_services
from tests.admin.running_server import start_server
from tests.platform.gateways import batches_in_memory

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "base"}}


@pytest.fixture
def kept(admin_side: AdminSide, demo_base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchServices]:
    services = admin_side.services
    tenant = services.accounts.tenants.create("batched")
    key = services.accounts.api_keys.create(tenant.id, "test")
    with open_services(services.database, demo_base) as gateway:
        kept = batches_in_memory(services.database)
        server = start_server(create_openai_app(gateway, kept))
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", key.secret)
        yield kept
        server.stop()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text(f"\n{json.dumps(LINE)}\n")
    return path


def answer_in_background(side: AdminSide, kept: BatchServices, tmp_path: Path, status: int | None) -> threading.Thread:
    """Stand in for the server that runs the next batch, which fails if `status` is None."""

    def run() -> None:
        queue = BatchQueue(side.services.database)
        while (claimed := queue.claim()) is None:
            pass
        claim, batch = claimed.claim, claimed.batch
        if status is None:
            claim.fail(batch.id, [BatchError("invalid_json", "the line is not JSON", line=1)])
            return
        claim.begin(batch.id, [InputLine(2, 1, 10, "base")], lambda: True)
        [line] = claim.waiting(batch.id, 10)
        claim.record(batch.id, [(line, StoredAnswer(status, b'{"custom_id": "a"}\n', None))])
        begun = claim.begin_files(batch.id)
        source = tmp_path / "answers"
        source.write_bytes(b'{"custom_id": "a"}\n')
        ids = (begun.output_file_id, None) if status == 200 else (None, begun.error_file_id)
        owner = Owner(batch.tenant_id, batch.api_key_id, is_limited=False)
        for file_id in filter(None, ids):
            file = TenantFile(
                id=file_id,
                tenant_id=owner.tenant_id,
                api_key_id=owner.api_key_id,
                purpose="batch_output",
                name="x",
                num_bytes=19,
                created_us=1,
                expires_us=None,
            )
            kept.files.put_output(file, source)
        claim.finish(batch.id, "completed", ids, 0)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(("status", "written", "exit_code"), [(200, "output", 0), (404, "errors", 1)])
def test_run_writes_the_answers(
    admin_side: AdminSide,
    kept: BatchServices,
    file: Path,
    tmp_path: Path,
    status: int,
    written: str,
    exit_code: int,
) -> None:
    thread = answer_in_background(admin_side, kept, tmp_path, status)
    done = invoke("run", file)
    thread.join()
    assert done.exit_code == exit_code, done.output
    path = tmp_path / f"requests.{written}.jsonl"
    assert path.read_bytes() == b'{"custom_id": "a"}\n'
    assert f"wrote {path}" in done.stdout
    again = invoke("run", file)
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)
    thread = answer_in_background(admin_side, kept, tmp_path, 604 - status)
    invoke("run", file, "--overwrite")
    thread.join()
    assert {one.name for one in tmp_path.glob("requests.*.jsonl")} == {
        f"requests.{'errors' if written == 'output' else 'output'}.jsonl"
    }


def test_run_into_a_directory_that_cannot_be_written_sends_nothing(
    kept: BatchServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The names of the answers are too long, but that of the file is not.
    file = tmp_path / f"{'x' * 240}.jsonl"
    file.write_text(json.dumps(LINE))
    done = invoke("run", file)
    assert (done.exit_code, "cannot be written: File name too long" in done.stderr) == (2, True), done.output
    assert printed_json(invoke("batches", "list", "--json"))["data"] == []
    assert [path.name for path in tmp_path.glob("x*")] == [file.name]


def test_run_refuses_to_replace_a_directory_before_it_sends_anything(
    kept: BatchServices, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "requests.output.jsonl").mkdir()
    done = invoke("run", file, "--overwrite")
    assert (done.exit_code, "cannot be written: Is a directory" in done.stderr) == (2, True), done.output
    assert printed_json(invoke("batches", "list", "--json"))["data"] == []


def test_answers_that_cannot_be_written_are_named(
    admin_side: AdminSide, kept: BatchServices, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_first(monkeypatch, BatchClient, "download", OSError(errno.ENOSPC, "No space left on device"))
    thread = answer_in_background(admin_side, kept, tmp_path, 200)
    done = invoke("run", file, "--json")
    thread.join()
    message = json.loads(done.stdout)["error"]["message"]
    assert (done.exit_code, "requests.output.jsonl cannot be written: No space left on device" in message) == (1, True)
    (listed,) = printed_json(invoke("batches", "list", "--json"))["data"]
    assert message.endswith(f"/v1/files/{listed['output_file_id']}/content")


def test_run_survives_a_restart_of_the_server(
    admin_side: AdminSide, kept: BatchServices, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ServerUnreachable("no server answers"), AdminError(502, "the server returned 502", None, None)
    fail_first(monkeypatch, BatchClient, "get", *gone)
    fail_first(monkeypatch, BatchClient, "download", *gone)
    thread = answer_in_background(admin_side, kept, tmp_path, 200)
    done = invoke("run", file)
    thread.join()
    assert done.exit_code == 0, done.output
    assert (tmp_path / "requests.output.jsonl").read_bytes() == b'{"custom_id": "a"}\n'


def test_run_names_its_batch_before_anything_can_fail(
    kept: BatchServices, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_first(monkeypatch, BatchClient, "get", AdminError(403, "the key is revoked", None, None))
    done = invoke("run", file)
    assert (done.exit_code, "the key is revoked" in done.stderr) == (1, True)
    (listed,) = printed_json(invoke("batches", "list", "--json"))["data"]
    assert f"{listed['id']} is queued: loramux batches show|cancel {listed['id']}" in done.stderr


def test_run_that_produces_nothing_keeps_earlier_answers(
    admin_side: AdminSide, kept: BatchServices, file: Path, tmp_path: Path
) -> None:
    earlier = tmp_path / "requests.output.jsonl", tmp_path / "requests.errors.jsonl"
    for path in earlier:
        path.write_text("earlier")
    thread = answer_in_background(admin_side, kept, tmp_path, None)
    done = invoke("run", file, "--overwrite")
    thread.join()
    assert (done.exit_code, "failed: 0 completed" in done.stdout) == (1, True)
    assert [path.read_text() for path in earlier] == ["earlier", "earlier"]


def test_batches_are_listed_shown_and_cancelled(kept: BatchServices, file: Path) -> None:
    made = printed_json(invoke("run", file, "--no-wait", "--json"))
    listed = printed_json(invoke("batches", "list", "--json"))
    assert [one["id"] for one in listed["data"]] == [made["id"]]
    assert made["id"] in invoke("batches", "list").stdout
    assert f"{made['id']} validating: 0 completed" in invoke("batches", "show", made["id"]).stdout
    assert f"{made['id']} is cancelling" in invoke("batches", "cancel", made["id"]).stdout
    for name in ("nonsense", "../files", "bat_" + "0" * 32):
        absent = invoke("batches", "show", name)
        assert absent.exit_code == 1, absent.output


@pytest.mark.parametrize(("status", "option", "kind"), [(200, (), "output"), (404, ("--errors",), "errors")])
def test_answers_and_errors_are_downloaded(
    admin_side: AdminSide,
    kept: BatchServices,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    option: tuple[str, ...],
    kind: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = printed_json(invoke("run", file, "--no-wait", "--json"))["id"]
    early = invoke("batches", "download", batch, *option)
    assert (early.exit_code, f"{batch} is validating and has no" in early.stderr) == (1, True)
    answer_in_background(admin_side, kept, tmp_path, status).join()
    fail_first(monkeypatch, BatchClient, "download", ServerUnreachable("no server answers"))
    done = invoke("batches", "download", batch, *option)
    path = tmp_path / f"{batch}.{kind}.jsonl"
    assert (done.exit_code, f"wrote {path.name}" in done.stdout) == (0, True), done.output
    assert path.read_bytes() == b'{"custom_id": "a"}\n'
    path.write_text("earlier")
    again = invoke("batches", "download", batch, *option)
    assert (again.exit_code, "exists already" in again.stderr, path.read_text()) == (2, True, "earlier")
    assert invoke("batches", "download", batch, *option, "--overwrite").exit_code == 0
    out = tmp_path / "own.jsonl"
    written = printed_json(invoke("batches", "download", batch, *option, "--out", out, "--json"))
    assert (written["written"], out.read_bytes()) == (str(out), path.read_bytes())
    others = invoke("batches", "download", batch, *(() if option else ("--errors",)), "--json")
    assert (others.exit_code, json.loads(others.stdout)["error"]["code"]) == (1, "no_file")


def test_download_that_cannot_be_written_leaves_nothing(
    admin_side: AdminSide, kept: BatchServices, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = printed_json(invoke("run", file, "--no-wait", "--json"))["id"]
    answer_in_background(admin_side, kept, tmp_path, 200).join()
    absent = invoke("batches", "download", batch, "--out", tmp_path / "absent" / "x.jsonl")
    assert (absent.exit_code, "cannot be written: No such file" in absent.stderr) == (2, True)
    unknown = invoke("batches", "download", "../nonsense", "--out", tmp_path / "x.jsonl")
    assert (unknown.exit_code, (tmp_path / "x.jsonl").exists()) == (1, False)
    fail_first(monkeypatch, BatchClient, "download", OSError(errno.ENOSPC, "No space left on device"))
    full = invoke("batches", "download", batch, "--out", tmp_path / "x.jsonl")
    assert (full.exit_code, "x.jsonl cannot be written: No space left on device" in full.stderr) == (1, True)


def test_administrator_lists_shows_and_cancels_batches_of_tenants(loramux: Run, admin_side: AdminSide) -> None:
    services = admin_side.services
    made = {}
    for slug in ("acme", "globex"):
        tenant = services.accounts.tenants.create(slug)
        key_id = services.accounts.api_keys.create(tenant.id, "test").key.id
        made[slug] = add_batch(services.database, tenant.id, key_id)
    listed = loramux("batches", "list", "--admin").stdout
    assert all(one in listed for pair in made.items() for one in pair)
    only = printed_json(loramux("batches", "list", "--admin", "--tenant", "acme", "--json"))["data"]
    assert [(one["id"], one["num_requests"], one["num_completed"]) for one in only] == [(made["acme"], 12, 2)]
    assert "in_progress: 2 completed, 1 failed of 12" in loramux("batches", "show", "--admin", made["acme"]).stdout
    assert f"{made['acme']} is cancelling" in loramux("batches", "cancel", "--admin", made["acme"]).stdout
    changes = printed_json(loramux("audit", "--action", "batch.cancel", "--json"))["data"]
    assert [(one["target"], one["tenant"]) for one in changes] == [(made["acme"], "acme")]
    with services.database.write() as connection:
        connection.execute(update(batches).values(state="completed", finished_us=1))
    refused = loramux("batches", "cancel", "--admin", made["acme"])
    assert (refused.exit_code, "the batch is completed" in refused.stderr) == (1, True)
    assert loramux("batches", "list", "--tenant", "acme").exit_code == 2


@pytest.mark.parametrize("content", ["", "[]", "nonsense", "{}"])
def test_file_without_requests_is_refused_before_it_is_sent(file: Path, content: str) -> None:
    file.write_text(content)
    done = invoke("run", file)
    assert done.exit_code == 2
    assert "the first line is not a request" in done.stderr


def test_missing_key_is_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "LORAMUX_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    done = invoke("run", file)
    assert (done.exit_code, "and OPENAI_API_KEY to the address" in done.stderr) == (3, True)


def test_unreachable_server_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    assert invoke("run", file).exit_code == 3
