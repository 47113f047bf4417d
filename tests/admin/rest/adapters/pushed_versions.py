from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import anyio
import httpx

FILES = ("adapter_config.json", "adapter_model.safetensors")
FURTHER_FILES = ("chat_template.jinja", "generation_config.json", "parsers.json")


async def new_adapter(http: httpx.AsyncClient, tenant: str = "acme", name: str = "support") -> str:
    await http.post("/admin/v1/tenants", json={"slug": tenant})
    response = await http.post("/admin/v1/adapters", json={"tenant": tenant, "name": name})
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


def declared(directory: Path) -> list[dict[str, Any]]:
    further = [name for name in FURTHER_FILES if (directory / name).exists()]
    contents = {name: (directory / name).read_bytes() for name in (*FILES, *further)}
    return [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    ]


async def push(http: httpx.AsyncClient, adapter_id: str, directory: Path) -> dict[str, Any]:
    upload = await http.post(f"/admin/v1/adapters/{adapter_id}/uploads", json={"files": declared(directory)})
    assert upload.status_code == 201, upload.text
    for file in upload.json()["files"]:
        put = await http.put(file["url"], content=(directory / file["name"]).read_bytes())
        assert put.status_code == 204, put.text
    response = await http.post(f"/admin/v1/adapters/{adapter_id}/versions", json={"upload_id": upload.json()["id"]})
    assert response.status_code == 202, response.text
    version = response.json()
    with anyio.fail_after(30):
        while version["state"] in ("pending", "validating"):
            await anyio.sleep(0.05)
            answer = await http.get(f"/admin/v1/adapters/{adapter_id}/versions/{version['number']}")
            version = answer.json()
    return dict(version)
