"""A pytest plugin that runs vLLM's tests of its server against ours, without vLLM."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import remote_server
import vector_decoding
from absent_modules import absent, allow_absent
from served_base import served_base

SERVER = remote_server.RemoteOpenAIServer.__name__
VLLM_VERSION = "0.33.0"
ABSENT = (
    # Modules of vLLM's tests that are not unpacked.
    "tests",
    "vllm",
    "torch",
    "openai_harmony",
    "rapidfuzz",
    "model_hosting_container_standards",
    "lm_eval",
    "PIL",
    "gpt_oss",
    "mcp",
)


def _tokenizer(*_arguments: Any, **_options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(served_base(remote_server.last_base).folder)


class _Platform:
    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments, **_options: 0 if name == "device_count" else False


class _Hub:
    def snapshot_download(self, *_arguments: Any, **_options: Any) -> str:
        return served_base("chat").adapter_folder


class _ModelConfig:
    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self._base = served_base(remote_server.last_base)

    def get_vocab_size(self) -> int:
        return self._base.vocabulary


class Answer:
    """Stands in for the classes of vLLM's answers. It makes the fields of a document attributes."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        try:
            return _answer(self._fields[name])
        except KeyError:
            # The only field that tests read although an answer can lack it.
            if name == "completion_tokens":
                return 0
            raise AttributeError(name) from None

    @classmethod
    def model_validate(cls, document: dict[str, Any]) -> Answer:
        return cls(document)

    def model_dump(self, exclude: Collection[str] = ()) -> dict[str, Any]:
        return {name: value for name, value in self._fields.items() if name not in exclude}


def _answer(value: Any) -> Any:
    if isinstance(value, list):
        return [_answer(item) for item in value]
    return Answer(value) if isinstance(value, dict) else value


def _float_embeddings(answer: Answer) -> list[list[float]]:
    return [item.embedding for item in answer.data]


def _check_embeddings_close(
    *, embeddings_0_lst: Any, embeddings_1_lst: Any, name_0: str, name_1: str, tol: float = 1e-3
) -> None:
    assert len(embeddings_0_lst) == len(embeddings_1_lst)
    for first, second in zip(embeddings_0_lst, embeddings_1_lst, strict=True):
        cosine = np.dot(first, second) / (np.linalg.norm(first) * np.linalg.norm(second))
        assert cosine >= 1 - tol, (name_0, name_1)


def _normalize(vectors: Any, p: int, dim: int) -> Any:
    return vectors / np.linalg.norm(vectors, ord=p, axis=dim, keepdims=True)


def _sigmoid(logits: Any) -> Any:
    return 1 / (1 + np.exp(-logits))


def _softmax(logits: Any, dim: int) -> Any:
    weights = np.exp(logits)
    return weights / weights.sum(axis=dim, keepdims=True)


class _Utils(ModuleType):
    """Stands in for vLLM's tests/utils.py. Its decorators return the test."""

    RemoteOpenAIServer = remote_server.RemoteOpenAIServer
    VLLM_PATH = Path("absent")
    ROCM_EXTRA_ARGS: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(name)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Prepare the modules that the suite's conftests import."""
    import transformers
    from transformers.utils import is_torch_available, is_vision_available

    # transformers remembers that these are missing, before their stand-ins can be found.
    assert not is_torch_available()
    assert not is_vision_available()
    transformers.AutoTokenizer.from_pretrained = _tokenizer
    transformers.AutoConfig.from_pretrained = absent("AutoConfig")
    utils = _Utils("tests.utils")
    utils.ROCM_EXTRA_ARGS = []  # type: ignore[assignment]
    sys.modules["tests.utils"] = utils
    allow_absent(
        ABSENT,
        {
            "vllm.platforms": {"current_platform": _Platform()},
            "vllm.tokenizers": {"get_tokenizer": _tokenizer},
            "vllm.transformers_utils.repo_utils": {"hf_api": _Hub},
            "vllm.config": {"ModelConfig": _ModelConfig},
            "vllm.model_executor.model_loader.weight_utils": {
                "download_weights_from_hf": lambda model, **_options: model
            },
            "torch": {
                "iinfo": lambda _kind: SimpleNamespace(min=-(2**63), max=2**63 - 1),
                "long": "long",
                "tensor": np.array,
                "allclose": np.allclose,
            },
            "torch.nn.functional": {"normalize": _normalize, "sigmoid": _sigmoid, "softmax": _softmax},
            "vllm.entrypoints.pooling.embed.protocol": {"EmbeddingResponse": Answer},
            "vllm.entrypoints.pooling.classify.protocol": {"ClassificationResponse": Answer},
            "vllm.entrypoints.pooling.pooling.protocol": {"PoolingResponse": Answer},
            "vllm.entrypoints.pooling.scoring.protocol": {"ScoreResponse": Answer, "RerankResponse": Answer},
            "tests.models.utils": {"check_embeddings_close": _check_embeddings_close},
            "tests.models.language.pooling.embed_utils": {"float_embeddings": _float_embeddings},
            "vllm.entrypoints.pooling.utils": vars(vector_decoding),
            "vllm.utils.serial_utils": vars(vector_decoding),
            "vllm.version": {"__version__": VLLM_VERSION, "_prev_minor_version": lambda: VLLM_VERSION},
        },
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that start a server, themselves or through a fixture. The others test vLLM's own modules.

    Of the tests that are repeated for many models, keep one model's, because another changes nothing here.
    """
    kept = [item for item in items if _starts_a_server(item) and _is_first_model(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _is_first_model(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is None or callspec.indices.get("server_config", 0) == 0


def _starts_a_server(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    functions = [item.obj]
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        functions += [definition.func for definition in definitions]
    return any(SERVER in _names(function) for function in functions)


def _names(function: Any) -> tuple[str, ...]:
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return code.co_names if isinstance(code, CodeType) else ()
