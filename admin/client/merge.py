"""Merges adapters of one tenant into a new version: downloads them, merges them on this machine, and pushes the result.

The server validates the result like any upload. An API key that can read and push adapters is enough.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loramux.adapter_store.errors import MergeRefused
from loramux.adapter_store.merging.merge import check_weights, merge_adapters
from loramux.adapter_store.merging.methods import MergeSettings
from loramux.adapter_store.merging.plain_lora import PlainLora
from loramux.admin.client.client import AdminClient
from loramux.admin.client.named_adapter import NamedAdapter, find_named
from loramux.admin.client.pull import pull_version
from loramux.admin.client.push import FURTHER_NAMES, Progress, PushedVersion, push_adapter

_SOURCE = re.compile(r"([^=]+)(?:=([^=]+))?")
_INTO = re.compile(r"([^/@:=]+)/([^/@:=]+)")


@dataclass(frozen=True, slots=True)
class MergeSource:
    """A source as given on the command line: `tenant/adapter[@version]` and a weight."""

    model: str
    weight: float

    @classmethod
    def parse(cls, text: str) -> MergeSource:
        """Parse `tenant/adapter[@version][=weight]`; the weight is 1 by default. Raises MergeRefused."""
        match = _SOURCE.fullmatch(text)
        try:
            return cls(match[1], float(match[2] or "1"))  # type: ignore[index]
        except (TypeError, ValueError):
            message = "name a source as tenant/adapter, tenant/adapter@version or tenant/adapter@version=weight"
            raise MergeRefused("invalid_sources", message, text) from None


@dataclass(frozen=True, slots=True)
class MergedVersion:
    """The new version and its sources. The name of each source includes the version that was merged."""

    pushed: PushedVersion
    sources: tuple[MergeSource, ...]


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge as given on the command line. `tenant` and `name` are those of the merged adapter."""

    sources: tuple[MergeSource, ...]
    tenant: str
    name: str

    @classmethod
    def parse(cls, sources: Sequence[str], into: str) -> Merge:
        """`into` is `tenant/adapter`. Raises MergeRefused."""
        parsed = tuple(map(MergeSource.parse, sources))
        check_weights([source.weight for source in parsed])
        match = _INTO.fullmatch(into)
        if match is None:
            raise MergeRefused("invalid_model_name", "name the merged adapter as tenant/adapter", "into")
        return cls(parsed, match[1], match[2])


def merge_versions(
    client: AdminClient,
    merge: Merge,
    settings: MergeSettings,
    timeout_s: float = 300.0,
    progress: Progress = lambda _what, _num_bytes: None,
) -> MergedVersion:
    """Merge versions of one tenant's adapters into the next version of an adapter.

    The new version gets the optional files of the first source. Raises MergeRefused, PullRefused, PushRefused or
    AdminError.
    """
    sources, tenant = merge.sources, merge.tenant
    # Find all adapters before the first download.
    found = [find_named(client, source.model) for source in sources]
    for named in found:
        _check_tenant(named, tenant)
    with tempfile.TemporaryDirectory() as scratch:
        places = [Path(scratch) / str(index) for index in range(len(found))]
        pulled = [
            pull_version(client, named, place, progress=progress) for named, place in zip(found, places, strict=True)
        ]
        merged = Path(scratch) / "merged"
        merged.mkdir()
        with ExitStack() as stack:
            adapters = [stack.enter_context(PlainLora(version.directory, version.model)) for version in pulled]
            weights = [source.weight for source in sources]
            merge_adapters(adapters, weights, settings, merged, lambda num_bytes: progress("merge", num_bytes))
        for file_name in FURTHER_NAMES:
            if (places[0] / file_name).exists():
                shutil.copyfile(places[0] / file_name, merged / file_name)
        pushed = push_adapter(client, merged, tenant, merge.name, timeout_s, progress)
    versions = (MergeSource(one.model, source.weight) for one, source in zip(pulled, sources, strict=True))
    return MergedVersion(pushed, tuple(versions))


def _check_tenant(named: NamedAdapter, tenant: str) -> None:
    """Refuse to copy weights from one tenant to another, even with an operator's key, which can read both."""
    if tenant not in (named.document["tenant"], named.document["tenant_id"]):
        model = named.document["model"]
        raise MergeRefused("merge_across_tenants", f"{model} does not belong to the tenant {tenant}", model)
