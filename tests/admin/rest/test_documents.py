from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from jsonschema import Draft202012Validator

from loramux.admin.serving.app import ADMIN_DOCUMENT, create_admin_app
from loramux.platform.listener.app import OPENAI_DOCUMENT
from loramux.platform.requests.openapi import operations
from tests.admin.admin_side import ADMIN_KEY, TARGET, open_admin_side
from tests.admin.openai_side import open_services, whole_app

Operation = tuple[str, str, str, dict[str, Any]]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory, demo_base: Path) -> dict[str, dict[str, Any]]:
    with (
        open_admin_side(tmp_path_factory.mktemp("documents"), TARGET) as side,
        open_services(side.services.database, demo_base) as services,
    ):
        return {
            "admin": ADMIN_DOCUMENT.of(create_admin_app(side.services)),
            "openai": OPENAI_DOCUMENT.of(whole_app(services, side)),
        }


@pytest.fixture(scope="module")
def found(documents: dict[str, dict[str, Any]]) -> list[Operation]:
    return [
        (name, path, method, operation)
        for name, document in documents.items()
        for path, operation, method in operations(document)
    ]


def test_every_operation_is_described(found: list[Operation]) -> None:
    assert len(found) > 60
    for name, path, method, operation in found:
        assert operation.get("summary"), (name, method, path)
        assert len(operation["summary"]) <= 120, (name, method, path)
        assert operation.get("description"), (name, method, path)
        assert operation.get("tags"), (name, method, path)
        for parameter in operation.get("parameters", []):
            assert "example" in parameter, (name, method, path, parameter["name"])
    for document in ("admin", "openai"):
        names = [operation["operationId"] for name, _, _, operation in found if name == document]
        assert len(names) == len(set(names))


def test_every_body_and_response_has_a_schema_and_a_valid_example(
    found: list[Operation], documents: dict[str, dict[str, Any]]
) -> None:
    for name, path, method, operation in found:
        for place, content in _contents(operation):
            schema = content["schema"]
            at = (name, method, path, place)
            assert schema.get("$ref") or schema.get("anyOf") or schema.get("type") in ("string", "object"), at
            if schema.get("type") == "object" and path != "/openapi.json":
                assert schema.get("properties"), f"{at} is an object with arbitrary fields"
            assert "example" in content, at
            checked = {**schema, "components": documents[name]["components"]}
            problems = [problem.message for problem in Draft202012Validator(checked).iter_errors(content["example"])]
            assert not problems, (at, problems, content["example"])


def test_no_field_of_a_request_for_inference_has_examples(documents: dict[str, dict[str, Any]]) -> None:
    """schemathesis combines a field's examples with those that it makes of deep types, and does not end."""
    for name, schema in documents["openai"]["components"]["schemas"].items():
        for field, described in schema.get("properties", {}).items():
            assert "examples" not in described, (name, field)


def test_every_operation_names_its_errors(found: list[Operation], documents: dict[str, dict[str, Any]]) -> None:
    for name, path, method, operation in found:
        public = ADMIN_DOCUMENT.public if name == "admin" else OPENAI_DOCUMENT.public
        statuses = set(operation["responses"])
        if path in public:
            assert operation["security"] == []
            continue
        assert operation["security"] == [{"key": []}]
        assert {"401", "403", "529" if path.startswith("/v1/messages") else "503"} <= statuses, (method, path)
        if "{" in path:
            assert {"400", "404"} <= statuses, (method, path)
        if "requestBody" in operation:
            assert {"400", "413", "415"} <= statuses, (method, path)
        if _names_model(operation, documents[name]):
            assert {"404", "409"} <= statuses, (method, path)
        if name == "admin" and method == "post":
            assert {"409", "422"} <= statuses, (method, path)
            assert any(one["name"] == "Idempotency-Key" for one in operation["parameters"])
        if any(one["name"] == "If-Match" for one in operation.get("parameters", [])):
            assert {"412", "428"} <= statuses, (method, path)
        for status, answer in operation["responses"].items():
            if status >= "400":
                error = answer["content"]["application/json"]["example"]["error"]
                assert error["type" if path.startswith("/v1/messages") else "code"], (method, path, status)


def test_every_patch_requires_if_match(found: list[Operation]) -> None:
    for _, path, method, operation in found:
        if method == "patch":
            assert any(one["name"] == "If-Match" and one["required"] for one in operation["parameters"]), path


def test_documents_contain_every_route(tmp_path: Path, demo_base: Path, documents: dict[str, dict[str, Any]]) -> None:
    with (
        open_admin_side(tmp_path, TARGET) as side,
        open_services(side.services.database, demo_base) as services,
    ):
        for name, app in (
            ("admin", create_admin_app(side.services)),
            ("openai", whole_app(services, side)),
        ):
            for route in iter_route_contexts(app.routes):
                path = getattr(route, "path_format", None)
                is_page = path in ("/", "/console") or str(path).startswith("/console/")
                if path is not None and not is_page and getattr(route, "include_in_schema", True):
                    assert path in documents[name]["paths"], (name, path)


@pytest.mark.anyio
async def test_openapi_document_requires_a_key(http: httpx.AsyncClient) -> None:
    assert (await http.get("/openapi.json", headers={"authorization": ""})).status_code == 401
    assert (await http.get("/openapi.json")).json()["openapi"].startswith("3.1")
    assert ADMIN_KEY not in (await http.get("/openapi.json")).text


def _names_model(operation: dict[str, Any], document: dict[str, Any]) -> bool:
    """Whether the body has a field `model`, which may name a version that the server's base has not accepted."""
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    schemas = document["components"]["schemas"]
    forms = [schemas.get(form.get("$ref", "").rpartition("/")[2], form) for form in schema.get("anyOf", [schema])]
    return any("model" in form.get("properties", {}) for form in forms)


def _contents(operation: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield "body", content
    for status, answer in operation["responses"].items():
        for content in answer.get("content", {}).values():
            yield status, content
