"""`loramux adapters pin|unpin|preload`: having a version in the page pool before it is asked for."""

from __future__ import annotations

from loramux.admin.commands.options import AsJson, VersionedModel
from loramux.admin.commands.output import connected_to, tell


def pin(model: VersionedModel, as_json: AsJson = False) -> None:
    """Load a version and keep it in the page pool, also across restarts, until 'unpin'."""
    _place(model, "pin", as_json)


def unpin(model: VersionedModel, as_json: AsJson = False) -> None:
    """Let a version give way to others again; it stays until its room is needed."""
    _place(model, "unpin", as_json)


def preload(model: VersionedModel, as_json: AsJson = False) -> None:
    """Load a version, so that its first request need not wait; it may be evicted again."""
    _place(model, "preload", as_json)


def _place(model: str, verb: str, as_json: bool) -> None:
    with connected_to(model, as_json, needs_version=True) as (client, named):
        placement = client.post(f"{named.version_path()}/{verb}", {})
    pages = f" on {placement['num_pages']} pages" if placement["num_pages"] is not None else ""
    pinned = ", pinned" if placement["pinned"] else ""
    tell(placement, f"{model} is {placement['state']}{pages}{pinned}", as_json)
