from __future__ import annotations

import msgspec
import pytest
from sqlalchemy.exc import DBAPIError

from loramux.migrations.database import Database
from loramux.platform.replicas.records import ReplicaRow
from loramux.platform.replicas.replica_table import ReplicaTable, Summary
from loramux.platform.replicas.residency import MAX_SUMMARY_BYTES, summarise
from tests.platform.ready_adapters import digest_of
from tests.platform.replicas.lab import own_row
from tests.platform.scripted_engine import ScriptedEngine

HELD = Summary(version=3, prefixes=summarise([digest_of("one"), digest_of("two")]))


def later(row: ReplicaRow) -> ReplicaRow:
    return msgspec.structs.replace(row, beat=row.beat + 1, num_running=row.num_running + 1)


def test_rows_are_read_as_published_and_summaries_only_when_they_change(clocked: Database) -> None:
    table = ReplicaTable(clocked)
    row = own_row("rep_a", ScriptedEngine(), certificates="PEM")
    table.publish(row, HELD, has_changed=True)
    first = table.read({})
    assert [msgspec.convert(values, ReplicaRow) for values in first.rows] == [row]
    assert first.summaries == {"rep_a": HELD}

    table.publish(later(row), Summary(version=4, prefixes=b""), has_changed=False)
    second = table.read({"rep_a": 3})
    assert [(values["beat"], values["num_running"]) for values in second.rows] == [(1, 1)]
    assert second.summaries == {}

    table.publish(later(row), Summary(version=4, prefixes=b""), has_changed=True)
    assert table.read({"rep_a": 3}).summaries == {"rep_a": Summary(version=4, prefixes=b"")}


def test_removed_row_comes_back_whole(clocked: Database) -> None:
    table = ReplicaTable(clocked)
    row = own_row("rep_a", ScriptedEngine())
    table.publish(row, HELD, has_changed=True)
    # A server that has changed its beat in the meantime is alive.
    table.publish(later(row), HELD, has_changed=False)
    table.remove("rep_a", beat=row.beat)
    assert len(table.read({}).rows) == 1
    table.remove("rep_a", beat=row.beat + 1)
    table.remove("rep_a")
    assert (table.read({}).rows, table.read({}).summaries) == ([], {})
    table.publish(row, HELD, has_changed=False)
    assert table.read({}).summaries == {"rep_a": HELD}


def test_a_server_removes_the_rows_of_earlier_servers_at_its_address(clocked: Database) -> None:
    table, scripted = ReplicaTable(clocked), ScriptedEngine()
    for name, address in (("rep_a", "host:1"), ("rep_b", "host:2"), ("rep_c", "host:1"), ("rep_d", "host:1")):
        table.publish(own_row(name, scripted, address=address), HELD, has_changed=True)
    table.remove_predecessors(own_row("rep_d", scripted, address="host:1"))
    found = table.read({})
    assert sorted(str(values["id"]) for values in found.rows) == ["rep_b", "rep_d"]
    assert sorted(found.summaries) == ["rep_b", "rep_d"]


def test_database_refuses_an_oversized_summary(clocked: Database) -> None:
    table = ReplicaTable(clocked)
    table.publish(own_row("rep_a", ScriptedEngine()), HELD, has_changed=True)
    oversized = Summary(version=4, prefixes=b"x" * (MAX_SUMMARY_BYTES + 1))
    with pytest.raises(DBAPIError):
        table.publish(own_row("rep_a", ScriptedEngine()), oversized, has_changed=True)
    assert table.read({}).summaries == {"rep_a": HELD}
