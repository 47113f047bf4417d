"""A client for the files and batches of a tenant, over the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx

from loramux.admin.client.client import AdminClient, Document, ServerUnreachable, document_of, refusal_of
from loramux.admin.client.openai_http import open_http
from loramux.admin.client.openai_server import URL_VARIABLE, OpenAIServer

if TYPE_CHECKING:
    from loramux.admin.client.push import Progress

PAGE_SIZE = 100


class BatchClient:
    """Calls `/v1/files` and `/v1/batches` with a tenant's key.

    Raises AdminError for a refusal, or ServerUnreachable if no server answers.
    """

    def __init__(self, server: OpenAIServer) -> None:
        self._url = server.url
        # The server answers an upload only after it has stored the whole file.
        self._http = open_http(server, httpx.Timeout(300.0, connect=5.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def upload(self, path: Path) -> Document:
        with path.open("rb") as file:
            return self._call("POST", "files", data={"purpose": "batch"}, files={"file": (path.name, file)})

    def create(self, file_id: str, endpoint: str) -> Document:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        return self._call("POST", "batches", json=body)

    def get(self, batch_id: str) -> Document:
        return self._call("GET", AdminClient.path("batches", batch_id), timeout=httpx.Timeout(30.0, connect=5.0))

    def cancel(self, batch_id: str) -> Document:
        return self._call("POST", AdminClient.path("batches", batch_id, "cancel"), json={})

    def list(self) -> Iterator[Document]:
        after: str | None = None
        while True:
            params = {"limit": PAGE_SIZE} if after is None else {"limit": PAGE_SIZE, "after": after}
            page = self._call("GET", "batches", params=params)
            yield from page["data"]
            if not page["has_more"]:
                return
            after = page["last_id"]

    def num_bytes(self, file_id: str) -> int:
        return int(self._call("GET", AdminClient.path("files", file_id))["bytes"])

    def download(self, file_id: str, destination: Path, progress: Progress = lambda _what, _num_bytes: None) -> None:
        """Write a file. It appears under its name only when it is complete. Raises OSError if it cannot be written."""
        partial = partial_path(destination)
        try:
            with self._http.stream("GET", self._content(file_id)) as response, partial.open("wb") as file:
                if not response.is_success:
                    response.read()
                    raise refusal_of(response)
                for chunk in response.iter_bytes():
                    file.write(chunk)
                    progress("download", len(chunk))
            partial.replace(destination)
        except httpx.TransportError as error:
            raise self._unreachable(error) from None
        finally:
            partial.unlink(missing_ok=True)

    def content_url(self, file_id: str) -> str:
        return f"{self._url}/{self._content(file_id)}"

    @staticmethod
    def _content(file_id: str) -> str:
        return AdminClient.path("files", file_id, "content")

    def _call(self, method: str, path: str, **arguments: Any) -> Document:
        try:
            response = self._http.request(method, path, **arguments)
        except httpx.TransportError as error:
            raise self._unreachable(error) from None
        return document_of(response, self._url, "an OpenAI API")

    def _unreachable(self, error: httpx.TransportError) -> ServerUnreachable:
        reason = str(error) or type(error).__name__
        return ServerUnreachable(f"no server answers at {self._url} ({reason}): start one or fix {URL_VARIABLE}")


def partial_path(destination: Path) -> Path:
    """Return where the bytes of a download are until it is complete."""
    return destination.with_name(f".{destination.name}.partial")
