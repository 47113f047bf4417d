"""Examples for OpenAPI documents: realistic values by field name, so that one table serves all routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HEX = "0193a1b2c3d4e5f60718293a4b5c6d7e"
_DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_TIME = 1763760000


def _error(message: str, code: str, param: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"message": message, "type": kind, "param": param, "code": code}


ERROR_EXAMPLES: Mapping[int, tuple[str, dict[str, Any]]] = {
    400: (
        "The call is malformed.",
        _error("limit: Input should be less than or equal to 100", "invalid_value", "limit"),
    ),
    401: ("The key is missing or invalid.", _error("the key is unknown, expired or revoked", "invalid_api_key")),
    403: ("The key's scopes do not allow the call.", _error("the call needs another scope", "insufficient_scope")),
    404: (
        "The resource does not exist, or the caller has no access to it.",
        _error("there is no such adapter", "adapter_not_found"),
    ),
    409: (
        "The state does not allow the change.",
        _error("the tenant already has such an adapter", "adapter_exists", "name"),
    ),
    412: (
        "The resource has changed since the caller read it.",
        _error("the resource has changed: read it again", "precondition_failed", "If-Match"),
    ),
    413: ("The body is too large.", _error("the body must not exceed 65536 bytes", "payload_too_large")),
    415: (
        "The body's content coding is not supported.",
        _error(
            "the body cannot have the content coding 'br': send it with the content coding gzip, or without any",
            "unsupported_content_encoding",
            "Content-Encoding",
        ),
    ),
    422: (
        "The Idempotency-Key was used for another call.",
        _error("this Idempotency-Key was used for another call", "idempotency_key_reused"),
    ),
    428: (
        "If-Match is missing.",
        _error("send If-Match with the resource's ETag", "precondition_required", "If-Match"),
    ),
    429: (
        "A quota is exhausted, or the caller has too many concurrent calls.",
        _error(
            "the tenant's limit of 100000 for tokens_per_minute leaves 900: running requests reserve 8200, and this "
            "request would reserve 1100; max_tokens of at most 800 would fit now",
            "rate_limit_exceeded",
            "tokens_per_minute",
            "rate_limit_error",
        ),
    ),
    500: ("An internal error.", _error("an internal error", "internal_error", None, "server_error")),
    503: ("Temporarily unavailable.", _error("the engine is restarting", "engine_unavailable", None, "server_error")),
}

_PREFIXES: Mapping[str, str] = {
    "tenant": "ten",
    "api_key": "key",
    "adapter_version": "adv",
    "job": "job",
    "request": "req",
    "upload": "upl",
    "eval": "evl",
    "file": "fil",
    "batch": "bat",
    "webhook": "whk",
}
_BY_NAME: Mapping[str, Any] = {
    "id": f"ada_{_HEX}",
    "tenant_id": f"ten_{_HEX}",
    "api_key_id": f"key_{_HEX}",
    "adapter_id": f"ada_{_HEX}",
    "version_id": f"adv_{_HEX}",
    "upload_id": f"upl_{_HEX}",
    "key_id": f"key_{_HEX}",
    "job_id": f"job_{_HEX}",
    "eval_id": f"evl_{_HEX}",
    "file_id": f"fil_{_HEX}",
    "input_file_id": f"fil_{_HEX}",
    "batch_id": f"bat_{_HEX}",
    "webhook_id": f"whk_{_HEX}",
    "last-event-id": "7",
    "adapter": f"ada_{_HEX}",
    "types": ["version.ready"],
    "filename": "requests.jsonl",
    "request_id": f"req_{_HEX}",
    "quota_id": f"qta_{_HEX}",
    "first_id": f"ada_{_HEX}",
    "last_id": f"ada_{_HEX}",
    "after": f"ada_{_HEX}",
    "before": f"ada_{_HEX}",
    "server_id": f"srv_{_HEX}",
    "actor": f"key_{_HEX}",
    "id_or_slug": "acme",
    "slug": "acme",
    "tenant": "acme",
    "display_name": "Acme Ltd",
    "name": "support",
    "model": "acme/support",
    "alias": "default",
    "endpoint": "chat",
    "digest": _DIGEST,
    "version_digest": _DIGEST,
    "chat_template": _DIGEST,
    "generation_config": {"temperature": 0.6, "top_k": 20},
    "server_load": 2,
    "invocation_tokens": [128002, 78191],
    "share_base_cache": 256,
    "not_sharing": [],
    "divergence": 0.0021,
    "task": {"kind": "classification", "labels": ["no", "yes"], "activation": "softmax"},
    "added_tokens": {"<|check|>": 128256},
    "num_tokens": 128256,
    "vocab_size": 128256,
    "num_experts": 128,
    "gate_up": "mlp.experts.gate_up_proj",
    "down": "mlp.experts.down_proj",
    "tool_call_parser": "hermes",
    "reasoning_parser": None,
    "sha256": _DIGEST,
    "number": 3,
    "version": 3,
    "secret": "sk-lmx-0000000000000000-0000000000000000000000000000000000000000000",
    "scopes": ["adapters", "base"],
    "adapters": ["support"],
    "If-Match": '"5f2b7c9a1e4d4f6b8a0c2e4f6a8b0c1d"',
    "if-match": '"3"',
    "Idempotency-Key": "2f1c9a52-8f3e-4a55-9d1c-3b6f0d2f7b11",
    "url": f"/admin/v1/adapters/ada_{_HEX}/uploads/upl_{_HEX}/files/adapter_config.json",
    "expires_in_s": 7_776_000,
    "grace_s": 86_400,
    "keep_previous": False,
    "weight": 100,
    "limit": 20,
    "report": {"modules": 7},
    "error": None,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "prompt": "The capital of France is",
    "tokens": [464, 3139, 286, 4881],
    "max_tokens": 16,
    "max_completion_tokens": 16,
    "group_by": "tenant,model",
    "metric": "tokens_per_minute",
    "source": None,
    "stream": False,
    "n": 1,
    "is_batch": False,
    "batch_percent": 50,
    "flex_percent": 50,
    "priority_percent": 200,
    "service_tier": "auto",
    "max_service_tier": "priority",
    "default_service_tier": "default",
}


def example_of(schema: Mapping[str, Any], schemas: Mapping[str, Any], name: str = "", depth: int = 0) -> Any:
    """Return a value that conforms to the schema, without optional fields."""
    if "$ref" in schema:
        return example_of(schemas[schema["$ref"].rpartition("/")[2]], schemas, name, depth + 1)
    for given in ("example", "const", "default"):
        if given in schema:
            return schema[given]
    if schema.get("examples"):
        return schema["examples"][0]
    if "enum" in schema:
        return schema["enum"][0]
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return _of_choices(choices, schemas, name, depth)
    if schema.get("type") == "object" or "properties" in schema:
        return _of_object(schema, schemas, name, depth)
    if name in _BY_NAME and _suits(_BY_NAME[name], schema):
        return _BY_NAME[name]
    return _plain(schema, schemas, name, depth)


def _of_choices(choices: list[Mapping[str, Any]], schemas: Mapping[str, Any], name: str, depth: int) -> Any:
    is_nullable = any(choice.get("type") == "null" for choice in choices)
    if is_nullable and name in _BY_NAME and _BY_NAME[name] is None:
        return None
    for choice in choices:
        if choice.get("type") != "null" and name in _BY_NAME and _suits(_BY_NAME[name], choice):
            return _BY_NAME[name]
    first = next((choice for choice in choices if choice.get("type") != "null"), choices[0])
    return example_of(first, schemas, name, depth)


def _of_object(schema: Mapping[str, Any], schemas: Mapping[str, Any], name: str, depth: int) -> Any:
    if "properties" not in schema:
        inner = schema.get("additionalProperties")
        if name in _BY_NAME and isinstance(_BY_NAME[name], dict):
            return _BY_NAME[name]
        if not isinstance(inner, Mapping) or not inner:
            return {}
        return {"default": example_of(inner, schemas, "", depth + 1)}
    required = schema.get("required", ())
    found = {
        key: example_of(value, schemas, key, depth + 1)
        for key, value in schema["properties"].items()
        if key in required
    }
    identifier = schema["properties"].get("object", {}).get("const")
    if "id" in found and identifier in _PREFIXES:
        found["id"] = f"{_PREFIXES[identifier]}_{_HEX}"
    return found


def _plain(schema: Mapping[str, Any], schemas: Mapping[str, Any], name: str, depth: int) -> Any:
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "array":
        return [example_of(schema.get("items", {}), schemas, "", depth + 1)] if depth < 8 else []
    if kind == "boolean":
        return False
    if kind in ("integer", "number"):
        value = _TIME if name.endswith(("_at", "_time")) or name in ("created", "start", "end") else 1
        return max(value, schema.get("minimum", value))
    if kind == "null":
        return None
    return "text"


def _suits(value: Any, schema: Mapping[str, Any]) -> bool:
    kinds = {"string": str, "integer": int, "number": (int, float), "array": list, "boolean": bool, "object": dict}
    kind = schema.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        return False
    return isinstance(value, kinds[kind]) and (kind == "boolean") == isinstance(value, bool)  # type: ignore[arg-type]
