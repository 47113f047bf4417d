"""The cookies of the console and their flags."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

SESSION = "loramux_console"
LOGIN = "loramux_login"
"""A cookie set before sign-in, from which the login form's token is derived."""
THEME = "loramux_theme"
"""The browser's choice of colours. The page's script sets it, so its name has no prefix."""
OIDC = "loramux_oidc_"
"""Name prefix of the cookies for OpenID sign-ins in progress. A browser has one such cookie per tab that is signing in.
"""


def read_cookie(request: Request, name: str) -> str | None:
    return _cookies(request).get(_full_name(request, name))


def read_theme(request: Request) -> str | None:
    return _cookies(request).get(THEME)


def read_cookies(request: Request, prefix: str) -> dict[str, str]:
    """Return the cookies whose names begin with the prefix, by name."""
    full, bare = _full_name(request, prefix), len(_full_name(request, ""))
    return {name[bare:]: value for name, value in _cookies(request).items() if name.startswith(full)}


def set_cookie(request: Request, response: Response, name: str, value: str, max_age_s: int | None = None) -> None:
    """Set a cookie for this host only. Over TLS, use a name that the browser accepts from no other host."""
    response.set_cookie(
        _full_name(request, name),
        value,
        max_age=max_age_s,
        path="/",
        secure=_is_secure(request),
        httponly=True,
        samesite="lax",
    )


def delete_cookie(request: Request, response: Response, name: str) -> None:
    set_cookie(request, response, name, "", 0)


def _cookies(request: Request) -> dict[str, str]:
    # `request.cookies` would also undo the quoting of all values, in quadratic time with some versions of Python. No
    # cookie of the console needs quotes.
    pairs = (pair.partition("=") for header in request.headers.getlist("cookie") for pair in header.split(";"))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _is_secure(request: Request) -> bool:
    # Behind a trusted proxy, the server has already taken the scheme from X-Forwarded-Proto.
    return request.url.scheme == "https"


def _full_name(request: Request, name: str) -> str:
    return f"__Host-{name}" if _is_secure(request) else name
