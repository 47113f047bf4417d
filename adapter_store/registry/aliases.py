"""Aliases: names for weighted sets of an adapter's versions, with a history for rollbacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import structlog
from sqlalchemy import Connection, Row, delete, func, insert, select, true, tuple_, update
from sqlalchemy.exc import SQLAlchemyError

from loramux.adapter_store.errors import (
    AliasChanged,
    AliasNotFound,
    InvalidAlias,
    NothingToRollBack,
    VersionNotFound,
    VersionNotReady,
)
from loramux.adapter_store.registry import base_sharing
from loramux.adapter_store.registry.base_sharing import not_sharing, why_not_shared
from loramux.adapter_store.registry.evals import check_passed
from loramux.adapter_store.registry.records import (
    DEFAULT_ALIAS,
    Alias,
    AliasAction,
    AliasChange,
    AliasTarget,
    CanaryRule,
    RequiredEval,
    WatchedAlias,
)
from loramux.adapter_store.registry.registry import MAX_VERSION, SLUG, check_slug, is_identifier, lock_adapter, owner_of
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.events import note_event
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_page
from loramux.migrations.schema import (
    adapter_alias_history,
    adapter_alias_targets,
    adapter_aliases,
    adapter_grants,
    adapter_versions,
)

log = structlog.get_logger(__name__)

MAX_TARGETS = 8
MAX_WEIGHT = 10_000
DEFAULT_WEIGHT = 100
WATCHED_AT_ONCE = 100
"""Number of aliases with a canary that are read in one transaction."""
FIRST = ("", "")
"""The place before the first alias of the first adapter."""
MAX_PASSED_OVER = 1000
"""Maximum number of earlier revisions among which a failed canary looks for one to return to."""
NOT_ROLLED_BACK = "not rolled back, because no earlier revision without the failed versions can be served"
MAX_WATCHED_TENANTS = 20
"""Maximum number of tenants whose requests count for one alias: the owner and tenants with a grant."""
SYSTEM = "system"
"""The actor of automatic changes, such as making the first ready version the default."""
MAX_UNMOVED = 1000
"""Maximum number of revisions without a move that a rollback passes over."""
KEPT = RequiredEval("", "", 0)
"""Stands for the eval that the alias already demands."""
KEPT_OVERFLOW = ""
"""Stands for the overflow that the alias already has. No model has this name."""
KEPT_SHARE = 0
"""Stands for the `share_base_cache` that the alias already has."""


@dataclass(frozen=True, slots=True)
class AliasSettings:
    """What an alias has besides its targets: see `Alias`."""

    required_eval: RequiredEval | None = None
    canary: CanaryRule | None = None
    overflow: str | None = None
    share_base_cache: int | None = None


NO_SETTINGS = AliasSettings()
KEPT_SETTINGS = AliasSettings(KEPT, None, KEPT_OVERFLOW, KEPT_SHARE)


class AdapterAliases:
    """Aliases in the database. Each move or rollback is one transaction that adds one row to the history.

    Revisions are numbered from 1 without gaps. An alias that is deleted and created again continues its revision
    numbers, so a revision is never ambiguous.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, adapter_ids: Sequence[str]) -> dict[str, dict[str, Alias]]:
        found: dict[str, dict[str, Alias]] = {adapter_id: {} for adapter_id in adapter_ids}
        with self._database.read() as connection:
            for adapter_id, alias in _read(connection, [name for name in adapter_ids if is_identifier(name)]):
                found[adapter_id][alias.name] = alias
        return found

    def get(self, adapter_id: str, name: str) -> Alias:
        with self._database.read() as connection:
            return _require(connection, adapter_id, name)

    def set(
        self,
        adapter_id: str,
        name: str,
        weights: Mapping[int, int],
        actor: str = SYSTEM,
        expected_revision: int | None = None,
        required_eval: RequiredEval | None = KEPT,
        canary: CanaryRule | None = None,
        overflow: str | None = KEPT_OVERFLOW,
        share_base_cache: int | None = KEPT_SHARE,
    ) -> Alias:
        """Point an alias at ready versions. `weights` maps version numbers to relative shares of the requests.

        If the alias demands an eval, every version whose share grows must have passed it. A `canary` watches these
        versions or, if there are none, those that the alias's running canary watches. `overflow` is the model that
        answers requests to the alias which would be refused, and `share_base_cache` the number of each prompt's last
        tokens that the adapter computes (see `Alias`). Raises InvalidName, InvalidAlias, AdapterNotFound,
        VersionNotFound, VersionNotReady, EvalNotPassed, or AliasChanged if the alias is no longer at
        `expected_revision` (0 means that it must not exist yet).
        """
        check_slug(name, "name")
        if not 0 < len(weights) <= MAX_TARGETS:
            raise InvalidAlias("invalid_targets", f"an alias must name 1 to {MAX_TARGETS} versions", "targets")
        if not all(0 < weight <= MAX_WEIGHT for weight in weights.values()):
            raise InvalidAlias("invalid_weight", f"a weight must be between 1 and {MAX_WEIGHT}", "weight")
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            _check_revision(_revision(connection, adapter_id, name), expected_revision)
            settings = AliasSettings(required_eval, canary, overflow, share_base_cache)
            return self._move(connection, adapter_id, name, weights, actor, settings)

    def advance(
        self, adapter_id: str, name: str, number: int, before: Collection[int], actor: str = SYSTEM
    ) -> tuple[Alias, tuple[AliasTarget, ...]]:
        """Point an alias at one ready version, and return the alias with the targets that it no longer has.

        If the alias already points at this version alone, these are the targets of its previous revision: a repeated
        call returns the same, unless a `set` or a rollback came in between.
        `before` contains the versions that the alias had when the work on this version began. If another call has
        changed them since, to a later version than this one, the alias is left as it is. Two overlapping pushes
        therefore end with the version of the later one. Raises InvalidName, AdapterNotFound, VersionNotFound,
        VersionNotReady or EvalNotPassed.
        """
        check_slug(name, "name")
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            present = next((alias for _, alias in _read(connection, [adapter_id], name)), None)
            now = () if present is None else present.targets
            numbers = {target.number for target in now}
            is_overtaken = numbers != set(before) and max(numbers, default=0) > number
            if present is not None and is_overtaken:
                return present, ()
            if present is not None and numbers == {number}:
                past = _change_at(connection, adapter_id, name, present.revision - 1)
                alias, replaced = present, () if past is None else past.targets
            else:
                alias = self._move(connection, adapter_id, name, {number: DEFAULT_WEIGHT}, actor)
                replaced = now
            return alias, tuple(target for target in replaced if target.number != number)

    def _move(
        self,
        connection: Connection,
        adapter_id: str,
        name: str,
        weights: Mapping[int, int],
        actor: str,
        settings: AliasSettings = KEPT_SETTINGS,
    ) -> Alias:
        targets = [_ready_target(connection, adapter_id, number, weight) for number, weight in weights.items()]
        present = next((alias for _, alias in _read(connection, [adapter_id], name)), None)
        required_eval, canary, overflow = settings.required_eval, settings.canary, settings.overflow
        share_base_cache = settings.share_base_cache
        if required_eval is KEPT:
            required_eval = None if present is None else present.required_eval
        if overflow == KEPT_OVERFLOW:
            overflow = None if present is None else present.overflow
        if share_base_cache == KEPT_SHARE:
            share_base_cache = None if present is None else present.share_base_cache
        elif share_base_cache is not None:
            why = why_not_shared(connection, [target.version_id for target in targets])
            if why is not None:
                raise InvalidAlias(base_sharing.CODE, why, base_sharing.PARAM)
        grown = _grown(() if present is None else present.targets, targets)
        if required_eval is not None:
            for target in grown:
                check_passed(connection, target, required_eval)
        if canary is not None:
            watched = [target.number for target in grown]
            if not watched and present is not None and present.canary is not None and present.canary.verdict is None:
                # Only the bounds of a running canary change.
                watched = [number for number in present.canary.versions if number in weights]
            if present is None or not watched:
                message = "a canary needs a version that gets more requests, and an earlier revision to return to"
                raise InvalidAlias("invalid_canary", message, "canary")
            canary = replace(canary, versions=tuple(watched))
        now_us = self._database.now_us(connection)
        settings = AliasSettings(required_eval, canary, overflow, share_base_cache)
        return change_alias(connection, adapter_id, name, targets, actor, "set", now_us, settings)

    def rollback(
        self,
        adapter_id: str,
        name: str,
        actor: str = SYSTEM,
        revision: int | None = None,
        expected_revision: int | None = None,
    ) -> Alias:
        """Restore the targets and the `share_base_cache` that an alias had at `revision`, by default those before its
        last move. A revision that changed only other settings, such as the bounds of a canary, is no move.

        The rollback adds a revision, so another rollback undoes it. It needs no eval, and ends a canary. Raises
        AdapterNotFound, AliasNotFound, NothingToRollBack, VersionNotReady if one of the targets can no longer be
        served, or AliasChanged if the alias is no longer at `expected_revision`.
        """
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            present = _require(connection, adapter_id, name)
            _check_revision(present.revision, expected_revision)
            past = _past(connection, adapter_id, present, revision)
            if past is None or past.revision >= present.revision:
                raise _nothing_at(revision)
            ready = [_ready_target(connection, adapter_id, target.number, target.weight) for target in past.targets]
            now_us = self._database.now_us(connection)
            settings = AliasSettings(present.required_eval, None, present.overflow, past.share_base_cache)
            return change_alias(connection, adapter_id, name, ready, actor, "rollback", now_us, settings)

    def fail_canary(
        self, adapter_id: str, name: str, expected_revision: int, failed_versions: Collection[int], verdict: str
    ) -> Alias:
        """End an alias's canary, and return to the newest revision without the versions that failed.

        Revisions whose versions can no longer all be served are passed over. If none is left, the alias keeps its
        targets and gets only the verdict. Raises AdapterNotFound, AliasNotFound, or AliasChanged if the alias is no
        longer at `expected_revision`.
        """
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            present = _require(connection, adapter_id, name)
            rule = present.canary
            if rule is None or rule.verdict is not None:
                raise AliasChanged(f"the alias {name!r} has no canary that watches its versions")
            _check_revision(present.revision, expected_revision)
            past = _newest_without(connection, adapter_id, name, present.revision, failed_versions)
            if past is None:
                verdict += f"; {NOT_ROLLED_BACK}"
            now_us, judged = self._database.now_us(connection), replace(rule, verdict=verdict)
            failed = {"alias": name, "revision": present.revision, "verdict": verdict, "rolled_back": past is not None}
            owner = owner_of(adapter_id)
            note_event(connection, now_us, "canary.failed", failed, tenant_id=owner, adapter_id=adapter_id)
            if past is not None:
                settings = AliasSettings(present.required_eval, judged, present.overflow, past.share_base_cache)
                return change_alias(connection, adapter_id, name, past.targets, SYSTEM, "rollback", now_us, settings)
            table, alias = adapter_aliases.c, replace(present, canary=judged)
            place = (table.adapter_id == adapter_id, table.name == name)
            connection.execute(update(adapter_aliases).where(*place).values(canary=asdict(judged)))
            changed = {"before": _shown(present), "after": _shown(alias)}
            audit(connection, now_us, "alias.canary", f"{adapter_id}:{name}", tenant_id=owner, **changed)
            return alias

    def watched(self, after: tuple[str, str] = FIRST) -> tuple[list[WatchedAlias], tuple[str, str]]:
        """Return up to WATCHED_AT_ONCE aliases with a canary that has no verdict yet, from those after the adapter ID
        and name `after`, and the place to go on from, which is FIRST after the last alias.

        An alias that cannot be read is logged and left out.
        """
        table, grants = adapter_aliases.c, adapter_grants.c
        is_open = table.canary.is_not(None) & table.canary["verdict"].as_string().is_(None)
        query = select(table.adapter_id, table.name).where(is_open, tuple_(table.adapter_id, table.name) > after)
        found = []
        with self._database.read() as connection:
            page = query.order_by(table.adapter_id, table.name).limit(WATCHED_AT_ONCE)
            rows = connection.execute(page).all()
            for adapter_id, name in rows:
                try:
                    alias = next((alias for _, alias in _read(connection, [adapter_id], name)), None)
                except SQLAlchemyError:
                    raise
                except Exception:
                    log.exception("an alias with a canary cannot be read", adapter_id=adapter_id, alias=name)
                    continue
                # Another server may have removed or judged the alias since.
                if alias is None or alias.canary is None or alias.canary.verdict is not None:
                    continue
                owner = connection.execute(select(owner_of(adapter_id))).scalar_one()
                granted = select(grants.tenant_id).where(grants.adapter_id == adapter_id)
                others = connection.scalars(granted.limit(MAX_WATCHED_TENANTS - 1))
                found.append(WatchedAlias(adapter_id, alias, (owner, *others)))
        is_last = len(rows) < WATCHED_AT_ONCE
        return found, FIRST if is_last else (rows[-1].adapter_id, rows[-1].name)

    def targets_at(self, adapter_id: str, name: str, revision: int | None = None) -> tuple[AliasTarget, ...]:
        """Return the targets that a rollback would restore. Raises AliasNotFound or NothingToRollBack."""
        with self._database.read() as connection:
            present = _require(connection, adapter_id, name)
            past = _past(connection, adapter_id, present, revision)
        if past is None:
            raise _nothing_at(revision)
        return past.targets

    def remove(self, adapter_id: str, name: str, expected_revision: int | None = None) -> None:
        """Delete an alias and all of its history except the last entry.

        A new alias with this name continues the revision numbers from that entry. Raises AdapterNotFound,
        AliasNotFound, InvalidAlias for the default alias, or AliasChanged if the alias is no longer at
        `expected_revision`.
        """
        if name == DEFAULT_ALIAS:
            raise InvalidAlias("default_alias", "the default alias can be moved, not removed", "name")
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            present = _require(connection, adapter_id, name)
            _check_revision(present.revision, expected_revision)
            before, now_us = _shown(present), self._database.now_us(connection)
            target, owner = f"{adapter_id}:{name}", owner_of(adapter_id)
            audit(connection, now_us, "alias.remove", target, tenant_id=owner, before=before)
            past = adapter_alias_history.c.revision < present.revision
            for table, which in (
                (adapter_alias_targets, true()),
                (adapter_alias_history, past),
                (adapter_aliases, true()),
            ):
                connection.execute(delete(table).where(table.c.adapter_id == adapter_id, table.c.name == name, which))

    def history(
        self, adapter_id: str, name: str, limit: int, after: str | None = None, before: str | None = None
    ) -> Page[AliasChange]:
        """List the changes to an alias, newest first. Raises AliasNotFound."""
        table = adapter_alias_history
        query = select(table).where(table.c.adapter_id == adapter_id, table.c.name == name)
        with self._database.read() as connection:
            _require(connection, adapter_id, name)
            return keyset_page(connection, query, table.c.id, _change, limit, after, before)


def change_alias(
    connection: Connection,
    adapter_id: str,
    name: str,
    targets: Sequence[AliasTarget],
    actor: str,
    action: AliasAction,
    now_us: int,
    settings: AliasSettings = NO_SETTINGS,
) -> Alias:
    """Create or move an alias and add its history row. The caller must hold the lock on the adapter's row."""
    present = _revision(connection, adapter_id, name)
    # Continue a deleted alias's revision numbers. A client that read the old alias then cannot change the new one by
    # mistake.
    revision = (present or _last_revision(connection, adapter_id, name)) + 1
    before = next((alias for _, alias in _read(connection, [adapter_id], name)), None)
    key = {"adapter_id": adapter_id, "name": name}
    place = (adapter_aliases.c.adapter_id == adapter_id, adapter_aliases.c.name == name)
    state = {
        "revision": revision,
        "updated_us": now_us,
        "required_eval": None if settings.required_eval is None else _demand(settings.required_eval),
        "canary": None if settings.canary is None else asdict(settings.canary),
        "overflow": settings.overflow,
        "share_base_cache": settings.share_base_cache,
    }
    if not present:
        connection.execute(insert(adapter_aliases).values(**key, **state))
    else:
        connection.execute(update(adapter_aliases).where(*place).values(state))
    table = adapter_alias_targets
    connection.execute(delete(table).where(table.c.adapter_id == adapter_id, table.c.name == name))
    ordered = tuple(sorted(targets, key=lambda target: target.number))
    connection.execute(
        insert(table), [{**key, "version_id": target.version_id, "weight": target.weight} for target in ordered]
    )
    connection.execute(
        insert(adapter_alias_history).values(
            **key,
            id=new_id("alh"),
            revision=revision,
            actor=actor,
            action=action,
            targets=[
                {"version_id": target.version_id, "number": target.number, "weight": target.weight}
                for target in ordered
            ],
            share_base_cache=settings.share_base_cache,
            created_us=now_us,
        )
    )
    alias = Alias(
        name,
        revision,
        ordered,
        now_us,
        settings.required_eval,
        settings.canary,
        settings.overflow,
        settings.share_base_cache,
        _not_sharing(connection, settings.share_base_cache, ordered),
    )
    changed = {"before": _shown(before), "after": _shown(alias)}
    audit(connection, now_us, f"alias.{action}", f"{adapter_id}:{name}", tenant_id=owner_of(adapter_id), **changed)
    weights = {str(target.number): target.weight for target in ordered}
    moved = {"alias": name, "action": action, "revision": revision, "targets": weights}
    note_event(connection, now_us, "alias.moved", moved, tenant_id=owner_of(adapter_id), adapter_id=adapter_id)
    return alias


def _shown(alias: Alias | None) -> dict[str, object]:
    if alias is None:
        return {}
    shown: dict[str, object] = {
        "revision": alias.revision,
        "targets": {str(target.number): target.weight for target in alias.targets},
    }
    if alias.required_eval is not None:
        demand = alias.required_eval
        shown["required_eval"] = f"{demand.name} {demand.min_ppm}" + (f" {demand.judge}" if demand.judge else "")
    if alias.canary is not None:
        shown["canary"] = alias.canary.verdict or "watching"
    if alias.overflow is not None:
        shown["overflow"] = alias.overflow
    if alias.share_base_cache is not None:
        shown["share_base_cache"] = alias.share_base_cache
    return shown


def _grown(present: Sequence[AliasTarget], wanted: Sequence[AliasTarget]) -> list[AliasTarget]:
    """Return the targets that get a larger share of the requests than now."""
    shares = _shares(present)
    return [target for target in wanted if _share_of(target, wanted) > shares.get(target.version_id, 0)]


def _shares(targets: Sequence[AliasTarget]) -> dict[str, Fraction]:
    return {target.version_id: _share_of(target, targets) for target in targets}


def _share_of(target: AliasTarget, targets: Sequence[AliasTarget]) -> Fraction:
    return Fraction(target.weight, sum(one.weight for one in targets))


def _read(connection: Connection, adapter_ids: Sequence[str], name: str | None = None) -> list[tuple[str, Alias]]:
    table, targets = adapter_aliases.c, adapter_alias_targets.c
    query = (
        select(
            table.adapter_id,
            table.name,
            table.revision,
            table.updated_us,
            table.required_eval,
            table.canary,
            table.overflow,
            table.share_base_cache,
            targets.version_id,
            targets.weight,
            adapter_versions.c.number,
        )
        .join(adapter_alias_targets, (targets.adapter_id == table.adapter_id) & (targets.name == table.name))
        .join(adapter_versions, adapter_versions.c.id == targets.version_id)
        .where(table.adapter_id.in_(adapter_ids))
        .order_by(table.adapter_id, table.name, adapter_versions.c.number)
    )
    if name is not None:
        query = query.where(table.name == name)
    grouped: dict[tuple[str, str], list[Any]] = {}
    for row in connection.execute(query):
        grouped.setdefault((row.adapter_id, row.name), []).append(row)
    return [(adapter_id, _alias(connection, name, rows)) for (adapter_id, name), rows in grouped.items()]


def _alias(connection: Connection, name: str, rows: Sequence[Any]) -> Alias:
    """Return the alias whose targets are these rows."""
    alias = rows[0]
    targets = tuple(AliasTarget(row.version_id, row.number, row.weight) for row in rows)
    return Alias(
        name,
        alias.revision,
        targets,
        alias.updated_us,
        None if alias.required_eval is None else RequiredEval(**alias.required_eval),
        None if alias.canary is None else _canary(alias.canary),
        alias.overflow,
        alias.share_base_cache,
        _not_sharing(connection, alias.share_base_cache, targets),
    )


def _not_sharing(connection: Connection, num_own: int | None, targets: Sequence[AliasTarget]) -> tuple[int, ...]:
    if num_own is None:
        return ()
    return tuple(not_sharing(connection, [target.version_id for target in targets]))


def _demand(wanted: RequiredEval) -> dict[str, Any]:
    """Return the stored form. Servers from before judges were part of it can read it if there is no judge."""
    return {key: value for key, value in asdict(wanted).items() if value is not None}


def _canary(document: Mapping[str, Any]) -> CanaryRule:
    return CanaryRule(**{**document, "versions": tuple(document["versions"])})


def _require(connection: Connection, adapter_id: str, name: str) -> Alias:
    found = _read(connection, [adapter_id], name) if is_identifier(adapter_id) and SLUG.fullmatch(name) else []
    if not found:
        raise AliasNotFound(f"the adapter has no alias {name!r}" if SLUG.fullmatch(name) else "there is no such alias")
    return found[0][1]


def _nothing_at(revision: int | None) -> NothingToRollBack:
    """The refusal to return to `revision`, or to the one before the last move."""
    if revision is None:
        return NothingToRollBack("the alias has not been moved yet, so there is nothing to return to")
    return NothingToRollBack(f"the alias has no revision {revision} before the current one")


def _revision(connection: Connection, adapter_id: str, name: str) -> int:
    query = select(adapter_aliases.c.revision).where(
        adapter_aliases.c.adapter_id == adapter_id, adapter_aliases.c.name == name
    )
    return connection.execute(query).scalar() or 0


def _last_revision(connection: Connection, adapter_id: str, name: str) -> int:
    """Return the last revision of an existing or deleted alias, or 0 if there never was such an alias."""
    table = adapter_alias_history.c
    query = select(func.max(table.revision)).where(table.adapter_id == adapter_id, table.name == name)
    return connection.execute(query).scalar() or 0


def _check_revision(revision: int, expected: int | None) -> None:
    if expected is not None and expected != revision:
        raise AliasChanged(f"the alias is at revision {revision}, not {expected}")


def _ready_target(connection: Connection, adapter_id: str, number: int, weight: int) -> AliasTarget:
    version = None
    if 0 < number <= MAX_VERSION:
        version = connection.execute(
            select(adapter_versions.c.id, adapter_versions.c.state).where(
                adapter_versions.c.adapter_id == adapter_id, adapter_versions.c.number == number
            )
        ).first()
    if version is None:
        raise VersionNotFound(f"the adapter has no version {number}")
    if version.state != "ready":
        raise VersionNotReady(f"version {number} is {version.state}: only a ready version can be served")
    return AliasTarget(version.id, number, weight)


def _past(connection: Connection, adapter_id: str, present: Alias, revision: int | None) -> AliasChange | None:
    """Return the change at `revision` or, without one, the newest change that a rollback would not repeat."""
    if revision is not None:
        return _change_at(connection, adapter_id, present.name, revision)
    table = adapter_alias_history
    before = table.c.revision < present.revision
    query = select(table).where(table.c.adapter_id == adapter_id, table.c.name == present.name, before)
    rows = connection.execute(query.order_by(table.c.revision.desc()).limit(MAX_UNMOVED))
    now = _shares(present.targets), present.share_base_cache
    changes = map(_change, rows)
    return next((change for change in changes if (_shares(change.targets), change.share_base_cache) != now), None)


def _change_at(connection: Connection, adapter_id: str, name: str, revision: int) -> AliasChange | None:
    if not 0 < revision <= MAX_VERSION:
        return None
    table = adapter_alias_history
    query = select(table).where(table.c.adapter_id == adapter_id, table.c.name == name, table.c.revision == revision)
    row = connection.execute(query).first()
    return None if row is None else _change(row)


def _newest_without(
    connection: Connection, adapter_id: str, name: str, revision: int, numbers: Collection[int]
) -> AliasChange | None:
    """Return the newest change before `revision` whose versions are all ready and not among `numbers`."""
    table = adapter_alias_history
    before = (table.c.adapter_id == adapter_id, table.c.name == name, table.c.revision < revision)
    query = select(table).where(*before).order_by(table.c.revision.desc()).limit(MAX_PASSED_OVER)
    ready = select(adapter_versions.c.number).where(
        adapter_versions.c.adapter_id == adapter_id, adapter_versions.c.state == "ready"
    )
    usable = set(connection.scalars(ready)) - set(numbers)
    changes = map(_change, connection.execute(query))
    return next((change for change in changes if all(one.number in usable for one in change.targets)), None)


def _change(row: Row[Any]) -> AliasChange:
    targets = tuple(AliasTarget(**target) for target in row.targets)
    return AliasChange(
        row.id, row.name, row.revision, row.actor, row.action, targets, row.share_base_cache, row.created_us
    )
