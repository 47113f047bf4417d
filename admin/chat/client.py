"""A client of an OpenAI API for `loramux chat`: lists models and streams answers."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx

from loramux.admin.client.openai_errors import error_text
from loramux.admin.client.openai_http import open_http
from loramux.admin.client.openai_server import KEY_VARIABLE, OpenAIServer
from loramux.admin.client.sse import EventReader, StreamTooLong
from loramux.admin.client.suggestions import did_you_mean

ANSWER_TIMEOUT_S = 600.0
"""Longest time between two parts of an answer, in seconds."""

MAX_ERROR_BYTES = 64 << 10
MAX_LIST_BYTES = 64 << 20


class ChatError(Exception):
    """The server refused a request or broke off an answer. The message says what to do about it."""


class ChatUnreachable(ChatError):
    """No server of an OpenAI API answers."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer."""

    text: str
    is_reasoning: bool = False
    is_cut: bool = False
    """True if the answer ends here because it has reached its token limit."""


class ChatClient:
    def __init__(self, server: OpenAIServer) -> None:
        self.url = server.url
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=10.0)
        self._http = open_http(server, timeout, **{"accept-encoding": "identity"})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Return the names of the models that the key can use. Raises ChatError."""
        body = b"".join(self._stream("GET", "/models", None, MAX_LIST_BYTES))
        try:
            return [str(model["id"]) for model in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ChatUnreachable(f"{self.url} is not an OpenAI API: it does not list models") from None

    def answer(
        self, model: str, messages: Sequence[Mapping[str, str]], more: Mapping[str, Any]
    ) -> Generator[Part, None, None]:
        """Stream an answer. Closing the iterator cancels the request. Raises ChatError."""
        body = {"model": model, "messages": messages, "stream": True, **more}
        reader = EventReader()
        try:
            for data in self._stream("POST", "/chat/completions", body, None):
                for event in reader.feed(data):
                    if event.startswith(b"{"):
                        yield from _parts(event)
        except (StreamTooLong, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ChatError(f"{self.url} does not answer with a stream of an OpenAI API") from None

    def _stream(self, method: str, path: str, body: object, max_bytes: int | None) -> Iterator[bytes]:
        num_bytes = 0
        try:
            with self._http.stream(method, self.url + path, json=body) as response:
                if response.status_code != 200:
                    self._refuse(response)
                for data in response.iter_bytes():
                    num_bytes += len(data)
                    if max_bytes is not None and num_bytes > max_bytes:
                        raise ChatError(f"{self.url} sends more than {max_bytes >> 20} MiB")
                    yield data
        except httpx.TimeoutException:
            raise ChatUnreachable(f"{self.url} took too long to answer") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            reason = str(error) or type(error).__name__
            raise ChatUnreachable(f"no server answers at {self.url} ({reason})") from None

    def _refuse(self, response: httpx.Response) -> None:
        content = b""
        for data in response.iter_bytes():
            content += data
            if len(content) > MAX_ERROR_BYTES:
                break
        message = error_text(response.status_code, content)
        if response.status_code == 401:
            raise ChatError(f"{message}: set {KEY_VARIABLE} to a key of this server")
        retry_after = response.headers.get("retry-after", "")
        if response.status_code == 429 and retry_after.isascii() and retry_after.isdecimal():
            raise ChatError(f"{message}: try again in {retry_after[:9]} s")
        if response.status_code == 404 and response.request.method == "POST":
            raise ModelUnknown(message)
        raise ChatError(message)


class ModelUnknown(ChatError):
    """The server does not know the model, or the key cannot use it."""


def explained(error: ModelUnknown, client: ChatClient, model: str) -> str:
    """Return the error's message with the closest name that the key can use, or with a hint where to find names."""
    try:
        close = did_you_mean(model, client.models())
    except ChatError:
        close = ""
    return f"{error}{close}"


def _parts(event: bytes) -> Iterator[Part]:
    document = json.loads(event)
    if "error" in document:
        raise ChatError(error_text(200, event))
    for choice in document.get("choices") or ():
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            yield Part(str(reasoning), is_reasoning=True)
        if delta.get("content"):
            yield Part(str(delta["content"]))
        if choice.get("finish_reason") == "length":
            yield Part("", is_cut=True)
