from __future__ import annotations

import time

from starlette.requests import Request

from loramux.admin.console.sessions.cookies import LOGIN, OIDC, read_cookie, read_cookies, read_theme


def sent(*cookies: bytes, scheme: str = "http") -> Request:
    headers = [(b"host", b"admin.example"), *((b"cookie", cookie) for cookie in cookies)]
    return Request({"type": "http", "scheme": scheme, "path": "/console/login", "headers": headers})


def test_cookies_are_found_among_others() -> None:
    request = sent(b"a=1; loramux_login=x=y;loramux_oidc_1=b.c", b"loramux_theme=dark; alone; loramux_oidc_2=")
    assert read_cookie(request, LOGIN) == "x=y"
    assert read_cookies(request, OIDC) == {"loramux_oidc_1": "b.c", "loramux_oidc_2": ""}
    assert read_theme(request) == "dark"
    assert read_cookie(sent(b"a=1"), LOGIN) is None
    secure = sent(b"__Host-loramux_login=x; loramux_login=planted; loramux_theme=dark", scheme="https")
    assert (read_cookie(secure, LOGIN), read_theme(secure)) == ("x", "dark")


def test_quoted_cookies_of_others_take_no_time() -> None:
    # Some versions of Python take 1 s to undo this quoting.
    request = sent(b'a="' + b"\\" * 22_000 + b'"; loramux_login=x')
    begun_s = time.thread_time()
    assert read_cookie(request, LOGIN) == "x"
    assert time.thread_time() - begun_s < 0.3
