from __future__ import annotations

import asyncio
import html
import re
from typing import Any

import anyio
import httpx
from starlette.types import ASGIApp

from tests.admin.admin_side import ADMIN_KEY


class Browser:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.csrf = ""

    async def sign_in(self, key: str) -> None:
        page = await self.client.get("/console/login")
        form = {"csrf": first_match(r'name="csrf" value="([^"]+)"', page.text), "key": key}
        assert (await self.client.post("/console/login", data=form)).status_code == 303
        self.csrf = first_match(r'name="csrf-token" content="([^"]+)"', (await self.get("/")).text)

    async def get(self, path: str, status: int = 200) -> httpx.Response:
        response = await self.client.get(f"/console{path}")
        assert response.status_code == status, (path, response.status_code, response.text[-300:])
        return response

    async def post(self, path: str, **fields: Any) -> str:
        """Send a form, follow the redirect, and return the message at the top of the page."""
        headers = {"referer": f"http://admin.example/console{fields.pop('referer', '/')}"}
        data = {"csrf": self.csrf, **fields}
        response = await self.client.post(f"/console{path}", data=data, headers=headers)
        assert response.status_code == 303, (path, response.text[-300:])
        page = await self.client.get(response.headers["location"])
        notices = re.search(r'<div id="notices".*?>(.*?)</main>', page.text, re.DOTALL)
        assert notices
        return re.sub(r"\s+", " ", notices[1])

    async def confirm(self, path: str, **choices: str) -> str:
        page = (await self.get(path)).text
        for said in ("What changes", "Who is affected", "How to undo", "Go back"):
            assert said in page, (path, said)
        form = first_match(r'(?s)<section.*(<form method="post".*?</form>)', page)
        fields: dict[str, list[str]] = {}
        for name, value in re.findall(r'name="([^"]+)" value="([^"]*)"', form):
            fields.setdefault(name, []).append(html.unescape(value))
        action = html.unescape(first_match(r'action="/console([^"]+)"', form))
        return await self.post(action, **{**fields, **choices}, referer=path)

    async def send(self, method: str, path: str, content: bytes, kind: str = "application/json") -> httpx.Response:
        headers = {"x-csrf-token": self.csrf, "content-type": kind}
        return await self.client.request(method, f"/console{path}", content=content, headers=headers)


def first_match(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, pattern
    return found[1]


class Stream:
    """Reads one of the app's responses while it is being sent. httpx's own transport waits for the end."""

    def __init__(self, app: ASGIApp, client: httpx.AsyncClient, path: str) -> None:
        cookies = "; ".join(f"{cookie.name}={cookie.value}" for cookie in client.cookies.jar)
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"admin.example"), (b"cookie", cookies.encode())],
            "client": ("127.0.0.1", 1),
            "server": ("admin.example", 80),
        }
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self._gone = asyncio.Event()

    async def __aenter__(self) -> Stream:
        async def receive() -> dict[str, Any]:
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self._chunks.put_nowait(message.get("body", b""))

        self._task = asyncio.create_task(self._app(self._scope, receive, send))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._gone.set()
        await self._task

    async def until(self, text: str) -> str:
        read = ""
        with anyio.fail_after(10):
            while text not in read:
                read += (await self._chunks.get()).decode()
        return read


async def login_token(browser: httpx.AsyncClient, path: str = "/console/login") -> str:
    response = await browser.get(path)
    return re.search(r'name="csrf" value="([^"]+)"', response.text)[1]  # type: ignore[index]


async def sign_in(browser: httpx.AsyncClient, key: str = ADMIN_KEY, root: str = "", **fields: str) -> httpx.Response:
    token = await login_token(browser, f"{root}/console/login")
    return await browser.post(f"{root}/console/login", data={"csrf": token, "key": key, **fields})
