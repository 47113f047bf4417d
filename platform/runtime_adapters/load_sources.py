"""The locations from which a tenant's programs may load adapters."""

from __future__ import annotations

from collections.abc import Sequence

from loramux.adapter_store.sources.adapter_sources import MAX_URL_LENGTH, is_allowable
from loramux.adapter_store.sources.directory_source import FILE_SCHEME
from loramux.platform.errors import InvalidRequest, NotFound

TENANT_PART = "{tenant}"
"""Stands for the slug of the calling tenant in a prefix."""


class LoadSources:
    """Prefixes such as `file:///srv/loras/{tenant}` or `s3://BUCKET/{tenant}`; none by default.

    Without `{tenant}`, every tenant may load from below the prefix. Raises ValueError if a prefix cannot be used.
    """

    def __init__(self, prefixes: Sequence[str] = ()) -> None:
        for prefix in prefixes:
            if prefix.count(TENANT_PART) > 1 or not is_allowable(_all_tenants(prefix)):
                raise ValueError(
                    f"{prefix!r} is not a source: use file:///DIRECTORY, s3://BUCKET/PREFIX or hf://OWNER; "
                    f"{TENANT_PART} can be one part of the path"
                )
        self._prefixes = tuple(prefix.rstrip("/") for prefix in prefixes)

    @property
    def allowed(self) -> tuple[str, ...]:
        """Prefixes that include the sources of every tenant, for `AdapterSources`."""
        return tuple(_all_tenants(prefix) for prefix in self._prefixes)

    def url(self, tenant_slug: str, path: str, param: str) -> str:
        """Return the URL of a path in a request: a URL, or an absolute path of the server's machine.

        Raises InvalidRequest, or NotFound if the tenant may not load from there.
        """
        url = f"{FILE_SCHEME}{path}" if path.startswith("/") else path
        if "://" not in url or len(url) > MAX_URL_LENGTH:
            raise InvalidRequest(
                "an adapter's path must be absolute, or a URL such as s3://BUCKET/PREFIX",
                code="invalid_source",
                param=param,
            )
        url = url.rstrip("/")
        if not self.covers(tenant_slug, url):
            raise NotFound("adapters may not be loaded from this path", code="source_not_allowed", param=param)
        return url

    def covers(self, tenant_slug: str, url: str) -> bool:
        """Return whether the tenant may load from a URL. A revision of a hub's repository does not matter."""
        place = f"{url.partition('@')[0] if url.startswith('hf://') else url}/"
        return any(place.startswith(f"{prefix.replace(TENANT_PART, tenant_slug)}/") for prefix in self._prefixes)


def _all_tenants(prefix: str) -> str:
    """Return the part of a prefix before `{tenant}`, or a string that is not allowable if `{tenant}` is no whole part,
    or if nothing stands before it.
    """
    before, found, after = prefix.partition(TENANT_PART)
    if not found:
        return prefix.rstrip("/")
    is_part = before.endswith("/") and after[:1] in ("", "/")
    return before.rstrip("/") if is_part and not before.endswith("://") else ""
