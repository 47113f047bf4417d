"""SQL that resolves a model name to versions, and the choice of one of an alias's versions for a request."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal

from sqlalchemy import BindParameter, Column, ColumnElement, Row, Select, bindparam, case, exists, func, literal, select
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from loramux.adapter_store.formats.version_files.adapter_task import AdapterTask
from loramux.adapter_store.registry.records import AdapterRef
from loramux.migrations.schema import (
    adapter_alias_targets,
    adapter_aliases,
    adapter_grants,
    adapter_versions,
    adapters,
    tenants,
    version_bases,
)

_NUM_FACTS = len(fields(AdapterRef)) - 1
"""Number of columns that describe a version. The last field of an AdapterRef belongs to an alias."""

VALID_BASES = select(version_bases.c.base_id).where(
    version_bases.c.version_id == bindparam("version_id"), version_bases.c.state == "ready"
)
"""Selects the bases that a version is valid for."""

Suffix = Literal["alias", "number", "digest"]
"""Kinds of suffix that can follow the adapter's name in a model name."""


@functools.cache
def versions_named(suffix: Suffix, has_caller: bool, has_base: bool) -> Select[*tuple[Any, ...]]:
    """Select an AdapterRef's columns and a weight for every version in service that matches a name, newest first.

    For an alias, its option `share_base_cache` comes before the weight.

    The bound parameters are:

    - `tenant` and `adapter`;
    - `wanted`, an alias or a version number, or `wanted` and `end`, a half-open range of digests;
    - `caller_id`, with `has_caller`: the tenant that must own the adapter or have been granted it;
    - `base_id`, with `has_base`: the base whose verdict is selected. Without `has_base`, every version counts as valid.
    """
    # The statement is cached because building it takes longer than running it on SQLite.
    query = _select_in_service(has_base).where(
        tenants.c.slug == bindparam("tenant"), adapters.c.name == bindparam("adapter")
    )
    query = query.order_by(adapter_versions.c.number.desc())
    if has_caller:
        query = query.where(_may_call())
    if suffix == "alias":
        aliases, targets = adapter_aliases.c, adapter_alias_targets.c
        is_alias = (aliases.adapter_id == targets.adapter_id) & (aliases.name == targets.name)
        query = _join_alias(query).join(adapter_aliases, is_alias)
        return query.add_columns(aliases.share_base_cache, targets.weight)
    query = query.add_columns(literal(1))
    if suffix == "number":
        return query.where(adapter_versions.c.number == bindparam("wanted"))
    # Use a range: for LIKE, PostgreSQL uses an index only under the C collation.
    digest = version_digest_of(adapter_versions.c)
    return query.where(digest >= bindparam("wanted"), digest < bindparam("end"))


@functools.cache
def default_models(has_base: bool) -> Select[*tuple[Any, ...]]:
    """Select the versions to which bare names resolve for the tenant `caller_id`.

    The tenant's own adapters come first. Each adapter's versions are sorted by ascending weight. `wanted` is the alias
    to which a bare name resolves. With `has_base`, only versions that are valid for one of the `bases` are selected.
    """
    by_weight = (adapter_alias_targets.c.weight, adapter_versions.c.number)
    return _join_alias(_select_callable(has_base)).order_by(*_by_name(), *by_weight)


@functools.cache
def callable_versions(has_base: bool) -> Select[*tuple[Any, ...]]:
    """Select the versions in service that the tenant `caller_id` may call.

    The tenant's own adapters come first, and each adapter's newest version. With `has_base`, only versions that are
    valid for one of the `bases` are selected.
    """
    return _select_callable(has_base).order_by(*_by_name(), adapter_versions.c.number.desc())


def draw(targets: Sequence[tuple[AdapterRef, int]], sticky: str) -> AdapterRef:
    """Choose one of the targets in proportion to their weights, by a hash of `sticky` alone.

    The newest version gets the end of the hash range, so that it loses no caller as its share grows.
    """
    ordered = sorted(targets, key=lambda target: target[0].version)
    position = int.from_bytes(hashlib.sha256(sticky.encode("utf-8", "surrogatepass")).digest()[:8]) / 2**64
    total = sum(weight for _, weight in ordered)
    reached = 0
    for ref, weight in ordered:
        reached += weight
        if position * total < reached:
            return ref
    return ordered[-1][0]


def version_digest_of(columns: ReadOnlyColumnCollection[str, Column[Any]]) -> ColumnElement[str]:
    """Return an expression for a version's digest, which is its weights' digest if there are no optional files."""
    return func.coalesce(columns.version_digest, columns.digest)


def adapter_ref(row: Row[*tuple[Any, ...]]) -> AdapterRef:
    """Return the AdapterRef of a row that begins with the columns of `_select_in_service`."""
    ref = AdapterRef(*row[:_NUM_FACTS])
    # The first column is a JSON list, or NULL, and the second an object, or NULL.
    task = AdapterTask.from_document(row.task)
    return replace(ref, invocation_tokens=tuple(ref.invocation_tokens or ()), task=task)


def _select_in_service(has_base: bool) -> Select[*tuple[Any, ...]]:
    verdicts = version_bases.c
    # A version that a server is validating has no verdict yet.
    verdict = case((verdicts.state.in_(("ready", "rejected")), verdicts.state), else_="pending")
    query = (
        select(
            tenants.c.id,
            tenants.c.slug,
            adapters.c.id.label("adapter_id"),
            adapters.c.name,
            adapter_versions.c.id,
            adapter_versions.c.number,
            adapter_versions.c.digest,
            adapter_versions.c.max_rank,
            version_digest_of(adapter_versions.c),
            adapter_versions.c.invocation_tokens,
            adapter_versions.c.task,
            (verdict if has_base else literal("ready")).label("base_verdict"),
        )
        .select_from(adapter_versions)
        .join(adapters, adapters.c.id == adapter_versions.c.adapter_id)
        .join(tenants, tenants.c.id == adapters.c.tenant_id)
        .where(adapter_versions.c.state == "ready", adapters.c.disabled_us.is_(None))
    )
    if not has_base:
        return query
    is_verdict = (verdicts.version_id == adapter_versions.c.id) & (verdicts.base_id == bindparam("base_id"))
    return query.outerjoin(version_bases, is_verdict)


def _select_callable(has_base: bool) -> Select[*tuple[Any, ...]]:
    query = _select_in_service(has_base=False).where(_may_call())
    verdicts = version_bases.c
    is_valid = exists().where(
        verdicts.version_id == adapter_versions.c.id,
        verdicts.base_id.in_(bindparam("bases", expanding=True)),
        verdicts.state == "ready",
    )
    return query.where(is_valid) if has_base else query


def _by_name() -> tuple[ColumnElement[Any], ...]:
    return (tenants.c.id != bindparam("caller_id"), tenants.c.slug, adapters.c.name)


def _join_alias(query: Select[*tuple[Any, ...]]) -> Select[*tuple[Any, ...]]:
    targets = adapter_alias_targets.c
    return query.join(
        adapter_alias_targets, (targets.adapter_id == adapters.c.id) & (targets.version_id == adapter_versions.c.id)
    ).where(targets.name == bindparam("wanted"))


def _may_call() -> ColumnElement[bool]:
    grants = adapter_grants.c
    caller_id: BindParameter[str] = bindparam("caller_id")
    granted = exists().where(grants.adapter_id == adapters.c.id, grants.tenant_id == caller_id)
    return (adapters.c.tenant_id == caller_id) | granted
