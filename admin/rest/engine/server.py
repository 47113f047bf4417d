"""`/server`: the server's versions, its clock, facts about the base, and the findings of its self-check."""

from __future__ import annotations

import platform
import time
from importlib.metadata import version
from typing import Any, Literal

from fastapi import APIRouter
from typing_extensions import TypedDict

from loramux.admin.rest.access import PlatformReader, Reader, Services
from loramux.admin.rest.listing import ListDocument, whole_list

router = APIRouter(prefix="/server", tags=["server"])


class ServerDocument(TypedDict):
    """Versions, base model and clock (`time_ms`, Unix time in milliseconds). `model_source` is the name with the commit
    under which the base was pulled, or null.
    """

    object: Literal["server"]
    version: str
    python: str
    torch: str
    base_model: str
    model_source: str | None
    device: str | None
    dtype: str | None
    quantization: str | None
    time_ms: int


@router.get("")
async def get_server(services: Services, caller: PlatformReader) -> ServerDocument:
    """Get the server's versions, base model and clock (Unix time in milliseconds)."""
    info = services.engine.client.info
    return {
        "object": "server",
        "version": version("loramux"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "base_model": services.engine.self_check.served_name,
        "model_source": services.engine.self_check.model_source,
        "device": info.device if info else None,
        "dtype": info.dtype if info else None,
        "quantization": info.quantization if info else None,
        "time_ms": time.time_ns() // 1_000_000,
    }


class VocabularyDocument(TypedDict):
    """The base's vocabulary. The tokenizer can have fewer tokens than the embedding and the head have rows.

    `added_tokens` contains the id of each token in the tokenizer's list of added tokens. `sha256` is the SHA-256 of all
    other tokens, as a JSON array of pairs of an id and a content, by id. `special_tokens` contains contents by role,
    such as `eos_token`.
    """

    object: Literal["vocabulary"]
    num_tokens: int
    vocab_size: int
    added_tokens: dict[str, int]
    special_tokens: dict[str, str]
    sha256: str


@router.get("/vocabulary")
async def get_vocabulary(services: Services, caller: Reader) -> VocabularyDocument:
    """Get the base's vocabulary, with which a push compares the adapter's tokenizer. The IDs of an adapter's added
    tokens start at `num_tokens`.
    """
    return {"object": "vocabulary", **services.adapters.vocabulary.document()}


class StructureDocument(TypedDict):
    """The base's traits that adapters of mlx-lm do not show. `gate_up` and `down` name the stacked weights of a layer's
    experts, or are null if adapters cannot change them. With `alternates`, the outputs of gate and up alternate.
    """

    object: Literal["structure"]
    tied_embeddings: bool
    num_experts: int
    gate_up: str | None
    down: str | None
    alternates: bool


@router.get("/structure")
async def get_structure(services: Services, caller: Reader) -> StructureDocument:
    """Get the traits of the base with which a push converts adapters of mlx-lm."""
    base = services.adapters.ingest.base_facts
    return {
        "object": "structure",
        "tied_embeddings": base.tied_embeddings,
        "num_experts": base.num_experts,
        "gate_up": base.gate_up,
        "down": base.down,
        "alternates": base.alternates,
    }


@router.get("/findings")
async def list_findings(services: Services, caller: PlatformReader) -> ListDocument[dict[str, Any]]:
    """Check the engine, the database, the object store, the disk and the sandbox. `mend` says how to fix a problem."""
    findings = await services.call(services.engine.self_check.findings)
    return whole_list([finding.document() for finding in findings])
