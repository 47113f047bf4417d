"""The cookies of the console and their flags."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

SESSION = "loramux_console"
LOGIN = "loramux_login"
"""Before anybody is signed in: what the login form's token is derived from."""
OIDC = "loramux_oidc_"
"""How the cookies of sign-ins through a provider begin that this browser has under way, one for each of its tabs."""


def read_cookie(request: Request, name: str) -> str | None:
    return request.cookies.get(_full_name(request, name))


def read_cookies(request: Request, prefix: str) -> dict[str, str]:
    """The cookies whose names begin so, by their names."""
    full, bare = _full_name(request, prefix), len(_full_name(request, ""))
    return {name[bare:]: value for name, value in request.cookies.items() if name.startswith(full)}


def set_cookie(request: Request, response: Response, name: str, value: str, max_age_s: int | None = None) -> None:
    """Set it for this host alone; over TLS under a name that the browser refuses to take from anywhere else."""
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


def _is_secure(request: Request) -> bool:
    # The server has put the proxy's word in here where it trusts the proxy.
    return request.url.scheme == "https"


def _full_name(request: Request, name: str) -> str:
    return f"__Host-{name}" if _is_secure(request) else name
