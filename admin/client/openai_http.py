"""The HTTP client with which the commands call an OpenAI API."""

from __future__ import annotations

import httpx

from loramux.admin.client.client import is_loopback
from loramux.admin.client.openai_server import OpenAIServer


def open_http(server: OpenAIServer, timeout: httpx.Timeout, **headers: str) -> httpx.Client:
    """Open a client whose paths are relative to the API's URL, and that sends the key and these headers."""
    return httpx.Client(
        base_url=f"{server.url}/",
        headers={**server.headers, **headers},
        timeout=timeout,
        # A proxy from the environment cannot reach this machine's loopback interface.
        trust_env=not is_loopback(server.url),
        # Loading the system's CA certificates takes 30 ms. A plain http URL does not need them.
        verify=not server.url.startswith("http://"),
    )
