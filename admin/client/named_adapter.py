"""Resolves `tenant/adapter[@version]`, as given on the command line, to the server's adapter and version."""

from __future__ import annotations

import re
from dataclasses import dataclass

from loramux.admin.client.client import AdminClient, AdminError, Document, WrongCall
from loramux.admin.client.suggestions import did_you_mean

_NAME = re.compile(r"([^/@:]+)/([^/@:]+)(?:@([1-9][0-9]{0,9}))?")


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter on the server, and the version number that was given with its name."""

    document: Document
    version: int | None

    @property
    def path(self) -> str:
        return f"adapters/{self.document['id']}"

    def version_path(self, number: int | None = None) -> str:
        """Return the path of a version, by default the version given with the name."""
        return f"{self.path}/versions/{self.version if number is None else number}"


def find_named(client: AdminClient, name: str, *, needs_version: bool = False) -> NamedAdapter:
    """Find an adapter. Raises AdminError for an unknown name, or WrongCall for a malformed name or one without a
    required version.
    """
    match = _NAME.fullmatch(name)
    if match is None or (needs_version and match[3] is None):
        form = "tenant/adapter@version" if needs_version else "tenant/adapter or tenant/adapter@version"
        raise WrongCall(f"{name!r} is not a name of the form {form}", "invalid_model_name", "model")
    tenant, adapter, version = match.groups()
    found = client.get("adapters", tenant=tenant, name=adapter)["data"]
    if not found:
        close = did_you_mean(adapter, (other["name"] for other in client.items("adapters", tenant=tenant)))
        raise AdminError(404, f"the tenant {tenant} has no adapter {adapter}{close}", "adapter_not_found", "model")
    return NamedAdapter(found[0], None if version is None else int(version))
