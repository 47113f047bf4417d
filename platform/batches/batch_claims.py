"""SQL for running batches. Only one server at a time can claim a batch and store its answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, case, delete, insert, select, update

from loramux.adapter_store.errors import ClaimLost
from loramux.migrations.claims import LEASE_US, NO_CLAIM, RowClaims
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import batch_lines, batches, reservations
from loramux.platform.batches.batch_rows import UNFINISHED, Batch, BatchError, BatchState, read_batch
from loramux.platform.batches.input_lines import InputLine
from loramux.platform.batches.tenant_files import mark_ready
from loramux.platform.ledger.settlement import Settlement

ADDED_AT_ONCE = 500
READ_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class WaitingLine:
    """A line without an answer. `request_id` is the request that it will run as."""

    line: int
    start: int
    num_bytes: int
    model: str
    request_id: str


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A line's answer: the HTTP status, and the line of the output or error file. `usage` is what the request costs."""

    status: int
    content: bytes
    usage: Settlement | None

    @property
    def has_succeeded(self) -> bool:
        return self.status == 200


@dataclass(frozen=True, slots=True)
class AnsweredLine:
    """A line with its answer. The answer is None if the batch ended before the line ran."""

    line: int
    start: int
    num_bytes: int
    status: int | None
    content: bytes | None


class BatchQueue:
    """Lets servers claim batches. Blocking."""

    def __init__(self, database: Database, lease_us: int = LEASE_US) -> None:
        self._database = database
        self._lease_us = lease_us

    def claim(
        self, but_tenants: tuple[str, ...] = (), waiting_since_us: Mapping[str, int] | None = None
    ) -> ClaimedBatch | None:
        """Claim the batch that has waited longest, and that no server runs, except those of `but_tenants`. A batch has
        waited since its creation, and those of the tenants in `waiting_since_us` since the time there.

        Each claim has an identity of its own. What is left of an earlier claim, even of the same server, can no longer
        store answers.
        """
        order = None
        if waiting_since_us:
            order = case(dict(waiting_since_us), value=batches.c.tenant_id, else_=batches.c.created_us)
        return self._claim(but_tenants, order=order)

    def has_waiting(self, but_tenants: tuple[str, ...]) -> bool:
        """True if there is a batch that no server runs, except those of `but_tenants`."""
        return RowClaims(self._database, batches, UNFINISHED, self._lease_us).find(but_tenants) is not None

    def claim_ending(self, but_tenants: tuple[str, ...] = ()) -> ClaimedBatch | None:
        """Like `claim`, but only a batch that can end without an engine: it has been cancelled, has expired, or has an
        answer to each line.
        """
        table = batches.c
        is_answered = (table.state == "in_progress") & (table.num_completed + table.num_failed == table.num_lines)
        is_over = table.state.in_(("cancelling", "finalizing")) | (table.expires_us <= self._database.now_us())
        return self._claim(but_tenants, is_answered | is_over)

    def _claim(
        self, but_tenants: tuple[str, ...], *conditions: ColumnElement[bool], order: ColumnElement[Any] | None = None
    ) -> ClaimedBatch | None:
        rows = RowClaims(self._database, batches, UNFINISHED, self._lease_us)
        batch_id = rows.find(but_tenants, *conditions, order=order)
        if batch_id is None:
            return None
        with self._database.write() as connection:
            if not rows.claim(connection, batch_id, {}, *conditions):
                return None
            return ClaimedBatch(read_batch(connection, batch_id), BatchClaim(self._database, rows))


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    batch: Batch
    claim: BatchClaim

    @property
    def id(self) -> str:
        return self.batch.id

    @property
    def tenant_id(self) -> str:
        return self.batch.tenant_id


class BatchClaim:
    """One claim on a batch. Blocking. Every method raises ClaimLost if another server has taken the batch over.

    validating -> in_progress -> finalizing -> completed or expired; or failed, or cancelling -> cancelled. An answer is
    stored before its request is settled. After a crash, `unsettled` finds the requests to settle.
    """

    def __init__(self, database: Database, rows: RowClaims) -> None:
        self._database = database
        self._rows = rows
        self.lease_s = rows.lease_s

    def renew(self, batch_id: str) -> BatchState:
        """Extend the claim, and return the batch's state."""
        with self._database.write() as connection:
            self._change(connection, batch_id, {})
            return read_batch(connection, batch_id).state

    def give_back(self, batch_id: str) -> None:
        """Let any server continue the batch at once."""
        with self._database.write() as connection:
            self._change(connection, batch_id, NO_CLAIM)

    def begin(self, batch_id: str, lines: Iterable[InputLine], are_good: Callable[[], bool]) -> BatchState:
        """Store the lines of a batch. If `are_good` afterwards, begin to run them. Return the batch's state."""
        with self._database.write() as connection:
            self._change(connection, batch_id, {})
            # An earlier claim may have stored some lines.
            connection.execute(delete(batch_lines).where(batch_lines.c.batch_id == batch_id))
        num_lines, rest = 0, iter(lines)
        while some := list(islice(rest, ADDED_AT_ONCE)):
            with self._database.write() as connection:
                self._change(connection, batch_id, {})
                connection.execute(insert(batch_lines), [{"batch_id": batch_id, **asdict(one)} for one in some])
            num_lines += len(some)
        if not are_good():
            return "validating"
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            self._change(connection, batch_id, {"num_lines": num_lines, "in_progress_us": now_us})
            begun = (batches.c.id == batch_id, batches.c.state == "validating")
            connection.execute(update(batches).where(*begun).values(state="in_progress"))
            return read_batch(connection, batch_id).state

    def fail(self, batch_id: str, errors: Sequence[BatchError]) -> None:
        """End a batch whose file cannot be used."""
        failures = [asdict(replace(one, message=one.message[:500])) for one in errors]
        with self._database.write() as connection:
            self._end(connection, batch_id, "failed", {"errors": failures})

    def waiting(
        self, batch_id: str, limit: int, but_lines: Collection[int] = (), but_models: Collection[str] = ()
    ) -> Sequence[WaitingLine]:
        """Return lines without an answer, ordered by model. Each gets a new request id.

        `but_lines` are left out, because they are running, and so are the lines of `but_models`.
        """
        table = batch_lines.c
        query = select(table.line, table.start, table.num_bytes, table.model).where(
            table.batch_id == batch_id,
            table.status.is_(None),
            table.line.not_in(but_lines),
            table.model.not_in(but_models),
        )
        with self._database.write() as connection:
            self._change(connection, batch_id, {})
            rows = connection.execute(query.order_by(table.model, table.line).limit(limit)).all()
            lines = [WaitingLine(*row, request_id=new_id("req")) for row in rows]
            self._name_requests(connection, batch_id, lines)
        return lines

    def rename(self, batch_id: str, line: WaitingLine) -> WaitingLine:
        """Return a line with a new request id, after its request has ended without an answer."""
        renamed = replace(line, request_id=new_id("req"))
        with self._database.write() as connection:
            self._change(connection, batch_id, {})
            self._name_requests(connection, batch_id, [renamed])
        return renamed

    def unsettled(self, batch_id: str) -> Sequence[tuple[str, Settlement | None]]:
        """Return the requests that an earlier claim has reserved and not settled, with the usage if there is an answer.

        Reservations of settled requests do not exist any more. A reservation that has been recovered meanwhile still
        does, and its settlement corrects the recovery's charge.
        """
        table = batch_lines.c
        query = (
            select(table.request_id, table.usage)
            .join_from(batch_lines, reservations, reservations.c.id == table.request_id)
            .where(table.batch_id == batch_id)
        )
        with self._database.read() as connection:
            return [(row.request_id, _settlement(row.usage)) for row in connection.execute(query)]

    def record(self, batch_id: str, answers: Sequence[tuple[WaitingLine, StoredAnswer]]) -> BatchState:
        """Store the answers of different lines, all or none, renew the claim, and return the batch's state."""
        num_completed = sum(answer.has_succeeded for _, answer in answers)
        counted = {
            "num_completed": batches.c.num_completed + num_completed,
            "num_failed": batches.c.num_failed + len(answers) - num_completed,
        }
        rows = [
            {
                "own_line": line.line,
                "own_request_id": line.request_id,
                "new_status": answer.status,
                "new_answer": answer.content,
                "new_usage": None if answer.usage is None else asdict(answer.usage),
            }
            for line, answer in answers
        ]
        table = batch_lines.c
        own = (table.line == bindparam("own_line"), table.request_id == bindparam("own_request_id"))
        values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in ("status", "answer", "usage")}
        change = update(batch_lines).where(table.batch_id == batch_id, *own, table.status.is_(None)).values(values)
        with self._database.write() as connection:
            self._change(connection, batch_id, counted)
            if connection.execute(change, rows).rowcount != len(rows):
                raise ClaimLost("another server has taken a line over")
            return read_batch(connection, batch_id).state

    def begin_files(self, batch_id: str) -> Batch:
        """Note that no line runs any more, and choose the identifiers of the batch's files."""
        with self._database.write() as connection:
            found = read_batch(connection, batch_id)
            values: dict[str, Any] = {
                "finalizing_us": found.finalizing_us or self._database.now_us(connection),
                "output_file_id": found.output_file_id or new_id("fil"),
                "error_file_id": found.error_file_id or new_id("fil"),
            }
            self._change(connection, batch_id, values)
            # A cancelled batch stays so.
            running = (batches.c.id == batch_id, batches.c.state == "in_progress")
            connection.execute(update(batches).where(*running).values(state="finalizing"))
            return read_batch(connection, batch_id)

    def answers(self, batch_id: str) -> Iterator[AnsweredLine]:
        """Yield all lines in the order of the file."""
        table, last = batch_lines.c, 0
        query = select(table.line, table.start, table.num_bytes, table.status, table.answer)
        while True:
            with self._database.write() as connection:
                self._change(connection, batch_id, {})
                some = query.where(table.batch_id == batch_id, table.line > last)
                rows = connection.execute(some.order_by(table.line).limit(READ_AT_ONCE)).all()
            for row in rows:
                content = None if row.answer is None else bytes(row.answer)
                yield AnsweredLine(row.line, row.start, row.num_bytes, row.status, content)
            if len(rows) < READ_AT_ONCE:
                return
            last = rows[-1].line

    def finish(self, batch_id: str, state: BatchState, file_ids: Sequence[str | None], num_unrun: int) -> None:
        """End a batch, and make its output and error files visible. A file that the batch does not have is None."""
        output_id, error_id = file_ids
        values = {
            "output_file_id": output_id,
            "error_file_id": error_id,
            "num_failed": batches.c.num_failed + num_unrun,
        }
        with self._database.write() as connection:
            self._end(connection, batch_id, state, values)
            for file_id in file_ids:
                if file_id is not None:
                    mark_ready(connection, file_id)

    def _end(self, connection: Connection, batch_id: str, state: BatchState, values: Mapping[str, Any]) -> None:
        finished_us = self._database.now_us(connection)
        self._change(connection, batch_id, {**values, **NO_CLAIM, "finished_us": finished_us, "state": state})
        connection.execute(delete(batch_lines).where(batch_lines.c.batch_id == batch_id))

    def _name_requests(self, connection: Connection, batch_id: str, lines: Sequence[WaitingLine]) -> None:
        if not lines:
            return
        own = (batch_lines.c.batch_id == batch_id, batch_lines.c.line == bindparam("own_line"))
        change = update(batch_lines).where(*own).values(request_id=bindparam("new_request_id"))
        connection.execute(change, [{"own_line": one.line, "new_request_id": one.request_id} for one in lines])

    def _change(self, connection: Connection, batch_id: str, values: Mapping[str, Any]) -> None:
        if not self._rows.change(connection, batch_id, values):
            raise ClaimLost("another server has taken the batch over, or it has been deleted")


def _settlement(usage: Mapping[str, Any] | None) -> Settlement | None:
    return None if usage is None else Settlement(**usage)
