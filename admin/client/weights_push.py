"""Pushes weights from memory: a trainer's client, synchronous and asynchronous. Importing it does not import torch.

with WeightsPush("http://127.0.0.1:8001", key, "acme/policy") as policy:
    pushed = policy.push(get_peft_model_state_dict(model), model.peft_config["default"], alias="default")
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Collection, Generator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import anyio
import httpx

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.mlx.base_facts import BaseFacts
from loramux.admin.client.client import AdminError, Document, ServerUnreachable, document_of, is_loopback, refusal_of
from loramux.admin.client.given_files import has_tokenizer
from loramux.admin.client.peft_directory import is_of_mlx, peft_directory
from loramux.admin.client.push import FILE_NAMES, PushedVersion, PushRefused, version_files

MAX_TRIES = 5
"""Maximum number of times that a push is sent while the server is busy with other pushes of the tenant."""
MAX_PAUSE_S = 5.0
"""Longest pause before a push is sent again, in seconds."""

_BUSY = ("too_many_pushes", "too_many_uploads", "too_many_open_uploads", "adapter_validating")
_CONFIG, _TENSORS = FILE_NAMES

Weights: TypeAlias = Mapping[str, Any] | Path | str
"""Tensors of torch or numpy by their names in PEFT's files, or the directory of an adapter."""
Wait: TypeAlias = Literal["ready", "resident"]
Running: TypeAlias = Literal["finish", "stop"]

_Files: TypeAlias = dict[str, tuple[str, io.BytesIO]]
_Call: TypeAlias = dict[str, Any]
"""Arguments of httpx's `request`."""
_Steps: TypeAlias = Generator[_Call | float, httpx.Response | None, PushedVersion]
"""The calls of a push, and pauses in seconds. Each call is answered with its response."""


class _Pusher:
    """What the two clients share: the adapter, and the calls of a push."""

    def __init__(self, adapter: str) -> None:
        tenant, _, name = adapter.partition("/")
        if not tenant or not name or "/" in name:
            raise ValueError(f"{adapter!r} is not an adapter: write TENANT/NAME")
        self._adapter = {"tenant": tenant, "name": name}
        self._adapter_id: str | None = None

    def _steps(
        self,
        weights: Weights,
        config: object,
        alias: str | None,
        wait: Wait,
        running: Running,
        untrained: bool,
        without: Collection[str],
    ) -> _Steps:
        if isinstance(weights, str | Path):
            files = yield from self._directory_files(Path(weights), config, without)
        else:
            files = _memory_files(weights, config)
        params: dict[str, Any] = {"wait": wait, "running": running, "untrained": untrained}
        if alias is not None:
            params["alias"] = alias
        if self._adapter_id is None:
            self._adapter_id = yield from self._find()
        call = {"method": "PUT", "url": f"adapters/{self._adapter_id}/push", "params": params, "files": files}
        for number in range(1, MAX_TRIES + 1):
            response = yield call
            assert response is not None
            if response.is_success:
                document = _document(response)
                return PushedVersion.of(document["model"], document)
            error = refusal_of(response)
            if error.code not in _BUSY or number == MAX_TRIES:
                raise error
            yield min(MAX_PAUSE_S, error.retry_after_s or 1.0)
        raise AssertionError("unreachable")

    def _directory_files(
        self, directory: Path, config: object, without: Collection[str]
    ) -> Generator[_Call, httpx.Response | None, _Files]:
        """Read the files with which `loramux adapters push` makes a version of a directory."""
        if config is not None:
            raise ValueError("a directory has its own configuration: omit config")
        facts: Document = {}
        base = BaseFacts(tied_embeddings=False)
        if has_tokenizer(directory):
            facts = _document((yield {"method": "GET", "url": "server/vocabulary"}))
        if is_of_mlx(directory):
            base = BaseFacts.from_document(_document((yield {"method": "GET", "url": "server/structure"})))
        try:
            with (
                peft_directory(directory, lambda: base) as joined,
                version_files(joined, lambda: facts, without) as paths,
            ):
                return _files({path.name: path.read_bytes() for path in paths})
        except AdapterRejected as error:
            raise PushRefused(error.message, error.code, error.param) from None

    def _find(self) -> Generator[_Call, httpx.Response | None, str]:
        """Find the adapter, or create it."""
        for is_created in (False, True):
            found = yield {"method": "GET", "url": "adapters", "params": self._adapter}
            listed = _document(found)["data"]
            if listed:
                return str(listed[0]["id"])
            if not is_created:
                made = yield {"method": "POST", "url": "adapters", "json": self._adapter}
                # Another client may have created the adapter first. Then the next look finds it.
                if made is None or made.status_code != httpx.codes.CONFLICT:
                    return str(_document(made)["id"])
        raise AdminError(404, "there is no such adapter", "adapter_not_found", None)


class WeightsPush(_Pusher):
    """Pushes versions of one adapter, which is created by the first push.

    `url` is the address of the admin listener, and `adapter` is TENANT/NAME. The key needs the scope `tenant:develop`,
    or `tenant:admin` to move `default`. Use it from one thread at a time.
    """

    def __init__(self, url: str, key: str, adapter: str, timeout_s: float = 120.0) -> None:
        """`timeout_s` limits each wait for the server, in seconds. Raises ValueError for another form of `adapter`."""
        super().__init__(adapter)
        self._http = httpx.Client(**_options(url, key, timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def push(
        self,
        weights: Weights,
        config: object = None,
        *,
        alias: str | None = None,
        wait: Wait = "ready",
        running: Running = "finish",
        untrained: bool = False,
        without: Collection[str] = (),
    ) -> PushedVersion:
        """Create a version and return when it is ready, or, with `wait="resident"`, when the engine has loaded it.

        `config` is a `peft.LoraConfig` or the content of `adapter_config.json`, and is needed unless `weights` is a
        directory, which becomes the same version as with `loramux adapters push`. `alias` then stands for the version.
        `running="stop"` cancels requests that still run on the alias's earlier versions. `untrained` accepts weights
        whose products B A are all zero. `without` names optional files that a directory's version leaves out, such as
        `chat_template.jinja`, `added_vocabulary.json` and `pooling.json`, also if they are made from other files.

        Raises ValueError or PushRefused for weights that cannot be sent, AdminError if the server refuses the push or
        rejects the version, ServerUnreachable, or OSError.
        """
        steps = self._steps(weights, config, alias, wait, running, untrained, without)
        response: httpx.Response | None = None
        while True:
            try:
                step = steps.send(response)
            except StopIteration as end:
                return _result(end)
            try:
                if isinstance(step, dict):
                    response = self._http.request(**step)
                else:
                    time.sleep(step)
                    response = None
            except httpx.TransportError as error:
                raise _unreachable(self._http.base_url, error) from None


class AsyncWeightsPush(_Pusher):
    """The same as WeightsPush, with coroutines. Several pushes may run at a time."""

    def __init__(self, url: str, key: str, adapter: str, timeout_s: float = 120.0) -> None:
        super().__init__(adapter)
        self._http = httpx.AsyncClient(**_options(url, key, timeout_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def push(
        self,
        weights: Weights,
        config: object = None,
        *,
        alias: str | None = None,
        wait: Wait = "ready",
        running: Running = "finish",
        untrained: bool = False,
        without: Collection[str] = (),
    ) -> PushedVersion:
        """`WeightsPush.push` as a coroutine. Weights from memory are copied before its first suspension."""
        steps = self._steps(weights, config, alias, wait, running, untrained, without)
        response: httpx.Response | None = None
        while True:
            try:
                step = steps.send(response)
            except StopIteration as end:
                return _result(end)
            try:
                if isinstance(step, dict):
                    response = await self._http.request(**step)
                else:
                    await anyio.sleep(step)
                    response = None
            except httpx.TransportError as error:
                raise _unreachable(self._http.base_url, error) from None


def _options(url: str, key: str, timeout_s: float) -> dict[str, Any]:
    return {
        "base_url": f"{url.rstrip('/')}/admin/v1/",
        "headers": {"authorization": f"Bearer {key}"},
        "timeout": httpx.Timeout(timeout_s, connect=5.0),
        # A proxy from the environment cannot reach this machine's loopback interface.
        "trust_env": not is_loopback(url),
    }


def _memory_files(weights: Mapping[str, Any], config: object) -> _Files:
    if config is None:
        raise ValueError("weights from memory need their configuration")
    return _files({_CONFIG: _config_bytes(config), _TENSORS: _tensor_bytes(weights)})


def _files(contents: Mapping[str, bytes]) -> _Files:
    # httpx sends a file in small chunks. It would pass bytes on as one chunk, and httpcore copies the rest of a chunk
    # after each call to the socket.
    return {name: (name, io.BytesIO(content)) for name, content in contents.items()}


def _config_bytes(config: object) -> bytes:
    """The JSON of a configuration. A `peft.LoraConfig` has `to_dict`, whose sets and enumerations JSON lacks."""
    to_dict = getattr(config, "to_dict", None)
    document = config if to_dict is None else to_dict()
    if not isinstance(document, Mapping):
        raise ValueError("the configuration must be a mapping or a peft.LoraConfig")
    try:
        return json.dumps(dict(document), default=_plain).encode()
    except TypeError as error:
        raise ValueError(f"the configuration cannot be written as JSON: {error}") from None


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _tensor_bytes(weights: Mapping[str, Any]) -> bytes:
    """The tensors as a safetensors file. A tensor of torch means that the caller has imported torch."""
    from safetensors import SafetensorError

    torch = sys.modules.get("torch")
    try:
        if torch is not None and any(isinstance(weight, torch.Tensor) for weight in weights.values()):
            from safetensors.torch import save

            return save(_separate({name: weight.detach().cpu().contiguous() for name, weight in weights.items()}))
        import numpy as np
        from safetensors.numpy import save as save_arrays

        return save_arrays({name: np.ascontiguousarray(weight) for name, weight in weights.items()})
    except (SafetensorError, AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"the weights cannot be written as safetensors: {error}") from error


def _separate(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copy tensors that share memory with earlier ones, such as tied weights, because safetensors refuses them."""
    seen = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        if storage in seen:
            tensors[name] = tensor.clone()
        seen.add(storage)
    return tensors


def _document(response: httpx.Response | None) -> Document:
    assert response is not None
    return document_of(response, response.url.host)


def _result(end: StopIteration) -> PushedVersion:
    pushed = end.value
    assert isinstance(pushed, PushedVersion)
    return pushed


def _unreachable(url: httpx.URL, error: httpx.TransportError) -> ServerUnreachable:
    place = url.netloc.decode()
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return ServerUnreachable(
            f"the loramux server at {place} took too long to answer: push again, which makes no second version of the "
            "same files"
        )
    reason = str(error) or type(error).__name__
    return ServerUnreachable(f"no loramux server answers at {place} ({reason})")
