"""A stand-in for the class with which vLLM's tests start a server. It starts a proxy to ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from renaming_proxy import RenamingProxy, Target
from served_base import ServedBase, is_served, served_base

DUMMY_KEY = "token-abc123"
REASONING, TOKENIZER_INFO = "--reasoning-parser", "--enable-tokenizer-info-endpoint"
TOOLS = frozenset({"--enable-auto-tool-choice", "--tool-call-parser", REASONING})
TELLING = frozenset({"--enable-force-include-usage", "--return-tokens-as-token-ids"})
CLASSES = {"BAAI/bge-reranker-base": "1", "jason9693/Qwen2.5-1.5B-apeach": "2"}
"""The number of classes of each classifier that the suite serves."""
TIMEOUT_S = 120.0

last_base = "chat"
"""The base of the last server, whose tokenizer a test may load."""


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with its values."""
    for position, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, is_joined, value = argument.partition("=")
            values = [value] if is_joined else []
            for further in arguments[position + 1 :] if not is_joined else ():
                if further.startswith("--"):
                    break
                values.append(further)
            yield name, values


def _base(options: Mapping[str, list[str]]) -> str:
    if TELLING & options.keys():
        return "telling"
    length = int(options.get("--max-model-len", ["0"])[0])
    if length > served_base("chat").context or TOOLS & options.keys():
        return "tools"
    shorter = f"chat-{length}"
    return shorter if is_served(shorter) else "chat"


def _names(model: str, options: Mapping[str, list[str]], base: ServedBase) -> dict[str, str]:
    """Return our name for each of a server's models.

    The base `tools` thinks in its answers, which only the tests of a reasoning parser expect. Its adapter does not, but
    has a chat template of its own.
    """
    is_silent = base == served_base("tools") and not options.keys() & {REASONING, TOKENIZER_INFO}
    ours = base.adapter if is_silent else base.model
    if model in CLASSES:
        ours = base.classifiers[CLASSES[model]]
    names = {}
    for option, values in options.items():
        if option == "--served-model-name":
            names.update(dict.fromkeys(values, ours))
        if option in ("--lora-modules", "--lora-module"):
            for value in values:
                name = json.loads(value)["name"] if value.startswith("{") else value.partition("=")[0]
                names[name] = base.adapter
    if "--served-model-name" not in options:
        names = {model: ours, **names}
    return names


class RemoteOpenAIServer:
    DUMMY_API_KEY = DUMMY_KEY
    uds = None
    show_hidden_metrics = False

    def __init__(
        self, model: str, arguments: Sequence[str] = (), *, env_dict: Mapping[str, str] | None = None, **_settings: Any
    ) -> None:
        global last_base
        options = dict(_options(arguments))
        last_base = _base(options)
        base = served_base(last_base)
        keys = {DUMMY_KEY, "EMPTY", "empty", (env_dict or {}).get("VLLM_API_KEY", DUMMY_KEY)}
        self._proxy = RenamingProxy(Target(base.host, base.port, base.key, _names(model, options, base), keys))
        self.host, self.port = "127.0.0.1", self._proxy.port

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._proxy.close()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> Any:
        return self._client("openai", "OpenAI", "v1", options)

    def get_async_client(self, **options: Any) -> Any:
        return self._client("openai", "AsyncOpenAI", "v1", options)

    def get_client_anthropic(self, **options: Any) -> Any:
        return self._client("anthropic", "Anthropic", "", options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        return self._client("anthropic", "AsyncAnthropic", "", options)

    def _client(self, package: str, name: str, path: str, options: dict[str, Any]) -> Any:
        settings = {"timeout": TIMEOUT_S, "max_retries": 0, "api_key": self.DUMMY_API_KEY, **options}
        return getattr(import_module(package), name)(base_url=self.url_for(path), **settings)
