"""`loramux adapters pin|unpin|preload`: load versions into the page pool, and keep them there."""

from __future__ import annotations

from loramux.admin.commands.options import AsJson, VersionedModel
from loramux.admin.commands.output import connected_to, tell


def pin(model: VersionedModel, as_json: AsJson = False) -> None:
    """Load a version and keep it in the page pool until 'unpin', even across restarts."""
    _place(model, "pin", as_json)


def unpin(model: VersionedModel, as_json: AsJson = False) -> None:
    """Make a version evictable again. It stays loaded until its pages are needed."""
    _place(model, "unpin", as_json)


def preload(model: VersionedModel, as_json: AsJson = False) -> None:
    """Load a version before its first request arrives. The version can be evicted later."""
    _place(model, "preload", as_json)


def _place(model: str, verb: str, as_json: bool) -> None:
    with connected_to(model, as_json, needs_version=True) as (client, named):
        placement = client.post(f"{named.version_path()}/{verb}", {})
    pages = f" on {placement['num_pages']} pages" if placement["num_pages"] is not None else ""
    pinned = ", pinned" if placement["pinned"] else ""
    tell(placement, f"{model} is {placement['state']}{pages}{pinned}", as_json)
