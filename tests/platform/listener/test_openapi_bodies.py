from __future__ import annotations

from typing import Any, ClassVar

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from loramux.platform.requests.openapi import describe, takes


class Counted(BaseModel):
    """Counts how often its schema is made."""

    num_schemas: ClassVar[int] = 0
    name: str

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        cls.num_schemas += 1
        return handler(schema)


def test_declared_body_gets_its_schema_only_in_the_document() -> None:
    router, app = APIRouter(), FastAPI()

    @router.post("/things", openapi_extra=takes(Counted))
    async def create_thing() -> None:
        """Create a thing."""

    app.include_router(router, prefix="/v1")
    assert Counted.num_schemas == 0
    body = describe(app, description="", public=frozenset())["paths"]["/v1/things"]["post"]["requestBody"]
    assert body["required"] is True
    assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Counted"}
    assert Counted.num_schemas == 1
