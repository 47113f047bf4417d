"""`loramux run` runs a file of requests; `loramux batches` lists, shows and cancels such batches, and downloads their
files.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.inference.openai_options import ApiKey, OpenAIUrl, openai_server
from loramux.admin.commands.options import AsJson
from loramux.admin.commands.output import (
    Columns,
    connected,
    error_document,
    fail,
    print_json,
    print_list,
    print_table,
    print_text,
    tell,
    time_in,
)
from loramux.admin.commands.progress import counted_progress
from loramux.admin.exit_codes import REFUSED, UNREACHABLE, WRONG_CALL

if TYPE_CHECKING:
    from loramux.admin.client.batch_client import BatchClient
    from loramux.admin.client.client import Document

app = typer.Typer(no_args_is_help=True, help="List, show, cancel and download batches; 'loramux run' starts one.")

POLL_S = 0.5
FINAL = ("completed", "failed", "expired", "cancelled")
FIRST_BYTES = 4 << 20
"""The first line of a file must end within this many bytes."""

Administers = Annotated[
    bool, typer.Option("--admin", help="Use the admin API, with an administrator's key, for batches of any tenant.")
]
BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="The batch's identifier, bat_...")]


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="One request per line.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files of an earlier run.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return once the batch is queued.")] = False,
    url: OpenAIUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Run a file of requests as a batch, and write FILE.output.jsonl and FILE.errors.jsonl."""
    from loramux.admin.client.retries import retry_read

    endpoint = _endpoint(file)
    outputs = {"output_file_id": file.with_suffix(".output.jsonl"), "error_file_id": file.with_suffix(".errors.jsonl")}
    if not no_wait:
        for path in outputs.values():
            _check_output(path, overwrite)
    with _connected(url, api_key, as_json) as client:
        found = client.create(client.upload(file)["id"], endpoint)
        if no_wait:
            tell(found, f"{found['id']} is queued: loramux batches show {found['id']}", as_json)
            return
        # Whatever happens to this command, the batch can be found by its identifier.
        print_text(f"loramux: {found['id']} is queued: loramux batches show|cancel {found['id']}", file=sys.stderr)
        found = _followed(client, found, as_json)
        written = [path for name, path in outputs.items() if found[name] is not None]
        try:
            for name, path in outputs.items():
                if found[name] is not None:
                    retry_read(partial(client.download, found[name], path))
                elif overwrite and written:
                    # A file of an earlier run would be taken for one of this run. A run without any keeps it.
                    path.unlink(missing_ok=True)
        except OSError as error:
            kept = " and ".join(client.content_url(found[name]) for name in outputs if found[name] is not None)
            message = f"{path} cannot be written: {error.strerror}. With the same key, get the answers from {kept}"
            fail(message, REFUSED, error_document(message, "output_not_written") if as_json else None)
    if as_json:
        print_json({**found, "written": [str(path) for path in written]})
    else:
        _print(found)
        for path in written:
            print_text(f"wrote {path}")
    if found["status"] != "completed" or found["request_counts"]["failed"]:
        raise typer.Exit(REFUSED)


@app.command("list")
def list_batches(
    is_admin: Administers = False,
    tenant: Annotated[str | None, typer.Option("--tenant", help="With --admin: only this tenant's.")] = None,
    url: OpenAIUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List the tenant's batches, newest first, or with --admin those of all tenants."""
    if tenant is not None and not is_admin:
        raise typer.BadParameter("--tenant needs --admin")
    if is_admin:
        with connected(as_json) as admin:
            print_list(admin.whole_list("batches", tenant=tenant), _ADMIN_COLUMNS, as_json)
        return
    with _connected(url, api_key, as_json) as client:
        found: Document = {"object": "list", "data": list(client.list())}
    columns: Columns = {
        "id": "id",
        "status": "status",
        "endpoint": "endpoint",
        "requests": lambda one: one["request_counts"]["total"],
        "completed": lambda one: one["request_counts"]["completed"],
        "failed": lambda one: one["request_counts"]["failed"],
        "made": time_in("created_at"),
    }
    print_list(found, columns, as_json)


@app.command()
def show(
    batch_id: BatchId,
    is_admin: Administers = False,
    url: OpenAIUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show a batch's progress, or why it failed."""
    if is_admin:
        with connected(as_json) as admin:
            document = admin.get(admin.path("batches", batch_id))
        print_json(document) if as_json else _print(_as_openai(document))
        return
    with _connected(url, api_key, as_json) as client:
        found = client.get(batch_id)
    print_json(found) if as_json else _print(found)


@app.command()
def cancel(
    batch_id: BatchId,
    is_admin: Administers = False,
    url: OpenAIUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Cancel a batch that has not finished. Its answers so far are kept."""
    if is_admin:
        with connected(as_json) as admin:
            document = admin.post(admin.path("batches", batch_id, "cancel"), {})
        tell(document, f"{document['id']} is {document['state']}", as_json)
        return
    with _connected(url, api_key, as_json) as client:
        found = client.cancel(batch_id)
    tell(found, f"{found['id']} is {found['status']}", as_json)


@app.command()
def download(
    batch_id: BatchId,
    has_errors: Annotated[bool, typer.Option("--errors", help="Download the errors instead of the answers.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="By default BATCH.output.jsonl or BATCH.errors.jsonl.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    url: OpenAIUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Download the answers or the errors of a batch that has ended."""
    from loramux.admin.client.retries import retry_read
    from loramux.admin.commands.transfer_progress import transfer_progress

    kind = "errors" if has_errors else "output"
    path = Path(f"{batch_id.replace(os.sep, '_')}.{kind}.jsonl") if out is None else out
    _check_output(path, overwrite)
    with _connected(url, api_key, as_json) as client:
        found = client.get(batch_id)
        file_id = found["error_file_id" if has_errors else "output_file_id"]
        if file_id is None:
            again = "" if found["status"] in FINAL else ": try again once it has ended"
            message = f"{found['id']} is {found['status']} and has no {'errors' if has_errors else 'answers'}{again}"
            fail(message, REFUSED, error_document(message, "no_file") if as_json else None)
        num_bytes = client.num_bytes(file_id)

        def read() -> None:
            with transfer_progress(num_bytes, as_json) as progress:
                client.download(file_id, path, progress)

        try:
            retry_read(read)
        except OSError as error:
            message = f"{path} cannot be written: {error.strerror}"
            fail(message, REFUSED, error_document(message, "output_not_written") if as_json else None)
    tell({"id": found["id"], "file": file_id, "written": str(path)}, f"wrote {path}", as_json)


@contextmanager
def _connected(url: str | None, api_key: str | None, as_json: bool) -> Iterator[BatchClient]:
    """Connect with the tenant's key. If a call fails, print a message and exit with an error code."""
    from loramux.admin.client.batch_client import BatchClient
    from loramux.admin.client.client import AdminError, ServerUnreachable

    try:
        with BatchClient(openai_server(url, api_key, as_json)) as client:
            yield client
    except AdminError as error:
        fail(error.message, REFUSED, error.envelope() if as_json else None)
    except ServerUnreachable as error:
        fail(str(error), UNREACHABLE, error_document(str(error), "server_unreachable") if as_json else None)


def _check_output(path: Path, may_replace: bool) -> None:
    """Exit unless the answers can be written to `path` once they have been paid for."""
    from loramux.admin.client.batch_client import partial_path
    from loramux.admin.commands.written_files import check_writable

    try:
        is_taken = path.exists()
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        check_writable(partial_path(path))
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}", WRONG_CALL)
    if is_taken and not may_replace:
        fail(f"{path} exists already: move it, or use --overwrite", WRONG_CALL)


def _endpoint(file: Path) -> str:
    """The endpoint of the first request, which the batch must have. The server checks everything else."""
    try:
        with file.open("rb") as lines:
            while (line := lines.readline(FIRST_BYTES)) and not line.strip():
                pass
        url = json.loads(line)["url"]
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}", WRONG_CALL)
    except (ValueError, KeyError, TypeError, RecursionError):
        fail(f"{file}: the first line is not a request with a url, such as /v1/chat/completions", WRONG_CALL)
    return str(url)


def _followed(client: BatchClient, found: Document, as_json: bool) -> Document:
    """Poll a batch until it ends."""
    from loramux.admin.client.retries import retry_read

    try:
        with counted_progress(None, "requests", as_json) as advance:
            while found["status"] not in FINAL:
                time.sleep(POLL_S)
                found = retry_read(partial(client.get, found["id"]))
                counts = found["request_counts"]
                advance(counts["completed"] + counts["failed"], counts["total"] or None)
    except KeyboardInterrupt:
        print_text(f"loramux: the batch goes on: loramux batches show|cancel {found['id']}", file=sys.stderr)
        raise
    return found


_ADMIN_COLUMNS: Columns = {
    "id": "id",
    "tenant": "tenant",
    "state": "state",
    "endpoint": "endpoint",
    "requests": "num_requests",
    "completed": "num_completed",
    "failed": "num_failed",
    "made": time_in("created_at"),
}


def _as_openai(found: Document) -> Document:
    """The fields that are printed, named as in OpenAI's API."""
    counts = {"total": found["num_requests"], "completed": found["num_completed"], "failed": found["num_failed"]}
    return {"id": found["id"], "status": found["state"], "request_counts": counts, "errors": {"data": found["errors"]}}


def _print(found: Document) -> None:
    counts = found["request_counts"]
    done = f"{counts['completed']} completed, {counts['failed']} failed of {counts['total']}"
    print_text(f"{found['id']} {found['status']}: {done}")
    errors = (found["errors"] or {"data": []})["data"]
    if errors:
        print_table(("line", "code", "error"), [(one["line"], one["code"], _shown(one["message"])) for one in errors])


def _shown(text: str) -> str:
    return "".join(one if one.isprintable() else " " for one in text)
