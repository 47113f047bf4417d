from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import func, select, text

from loramux.adapter_store.formats.files.file_names import TEMPLATE_FILE
from loramux.adapter_store.registry.bases import Bases
from loramux.engine.architectures.model_files import base_sha256
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.generation.generation import PredictionUsage
from loramux.platform.quotas.metrics import TOKENS_PER_MONTH
from loramux.platform.quotas.policies import QuotaPolicies
from tests.conformance.drawn_requests import LAB_ADAPTERS, MESSAGES, STOPPING, DrawnRequest, streamed_completion
from tests.conformance.noted_ends import DraftCounts, NotedEnd, read_ends
from tests.platform.ready_adapters import add_ready_adapter, digest_of
from tests.platform.storing import KEY, allow
from tests.platform.tool_base import make_tool_base
from tests.ports import free_port

PATIENCE_S = 60.0
MAX_MODEL_LEN = 4096
"""Context of the lab's base. It is long enough for several grants of tokens."""


@dataclass(slots=True)
class LabGateway:
    settings: dict[str, Any]
    pid: int = 0

    @property
    def port(self) -> int:
        return int(self.settings["port"])


@dataclass(frozen=True, slots=True)
class Truth:
    """The numbers of tokens for one request, as recorded by the engine."""

    prompt_tokens: int
    completion_tokens: int
    ends: tuple[NotedEnd, ...] = field(default=(), compare=False)
    """The ends of the request's choices."""

    @staticmethod
    def of(ends: Iterable[NotedEnd]) -> Truth:
        ends = tuple(ends)
        # A prompt is charged once, no matter how many choices continue it.
        num_prompt = max([end.prompt_tokens for end in ends], default=0)
        return Truth(num_prompt, sum(end.completion_tokens for end in ends), ends)

    def committed_in_last(self, num_outputs: int) -> int:
        """The number of tokens in the last outputs of all choices."""
        return sum(sum(end.outputs[-num_outputs:]) for end in self.ends)

    def predicted(self, event: Any) -> PredictionUsage:
        """What the usage of the request must say about its prediction. `event` is its event in the ledger."""
        counts = DraftCounts.of(self.ends)
        drafted, accepted = counts.drafted["prediction"], counts.accepted["prediction"]
        # Drafts may be accepted after a stop string. They are not charged.
        accepted = min(accepted, event.completion_tokens)
        return PredictionUsage(accepted, drafted - accepted)

    def fits(self, event: Any) -> bool:
        """True if the ledger's event bills what the engine committed.

        The engine may commit more tokens, and even end, before it learns that a stop string ended the choice.
        """
        if event.end_user == STOPPING:
            is_less = 0 <= event.completion_tokens <= self.completion_tokens
            return is_less and event.prompt_tokens == self.prompt_tokens
        return Truth(event.prompt_tokens, event.completion_tokens) == self


_SEE_RESERVATIONS = """
CREATE TABLE IF NOT EXISTS seen_reservations
    (id text PRIMARY KEY, tenant_id text, reserved_tokens bigint, checkpoint_tokens bigint);
CREATE OR REPLACE FUNCTION see_reservation() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO seen_reservations VALUES (NEW.id, NEW.tenant_id, NEW.reserved_tokens, NEW.checkpoint_tokens)
    ON CONFLICT (id) DO UPDATE
        SET reserved_tokens = excluded.reserved_tokens, checkpoint_tokens = excluded.checkpoint_tokens;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER see_reservation AFTER INSERT OR UPDATE OF reserved_tokens, checkpoint_tokens
    ON reservations FOR EACH ROW EXECUTE FUNCTION see_reservation();
"""
"""A trigger that records reservations, because settled ones are deleted."""


class GatewayLab:
    """Starts and kills gateways. `truths` returns their engine's token counts.

    The gateways' data and logs are under `disk`, and everything else is under `directory`.
    """

    def __init__(
        self, directory: Path, database_url: str, model: Path, num_gateways: int, disk: Path | None = None
    ) -> None:
        self._directory, self._disk = directory, disk or directory
        self._database_url, self._model = database_url, model
        self.database = Database(database_url)
        self.database.upgrade()
        self.base_id = base_sha256(model)
        Bases(self.database).register(self.base_id, "base")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), *sys.path])
        self._engine = self._start_engine(environment)
        self._maker = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.gateway_maker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, **self._maker_environment()},
        )
        self.gateways = [LabGateway(self._settings(number)) for number in range(num_gateways)]
        try:
            for gateway in self.gateways:
                self.start(gateway)
            for gateway in self.gateways:
                self.wait_ready(gateway)
        except BaseException:
            self.close()
            raise

    def _maker_environment(self) -> dict[str, str]:
        """Further environment variables of the gateways."""
        return {}

    def _start_engine(self, environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
        """Start the engine that all gateways share."""
        socket, ends = self._directory / "engine.sock", self._directory / "ends"
        engine = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.paced_engine", str(self._model), str(ends), str(socket)],
            stdin=subprocess.PIPE,
            env=environment,
        )
        until(socket.exists)
        return engine

    def _settings(self, number: int) -> dict[str, Any]:
        return {
            "model": str(self._model),
            "engine": str(self._directory / "engine.sock"),
            "data_dir": str(self._disk / f"gateway-{number}"),
            "database_url": self._database_url,
            "served_name": "base",
            "response_key": KEY.decode(),
            "blob_url": f"file://{self._directory / 'blobs'}",
            "port": free_port(),
            "admin_port": free_port(),
            "log": str(self._disk / f"gateway-{number}.log"),
        }

    def close(self) -> None:
        for gateway in self.gateways:
            with contextlib.suppress(ProcessLookupError):
                os.kill(gateway.pid, signal.SIGTERM)
        try:
            until(lambda: not any(Path(f"/proc/{gateway.pid}").exists() for gateway in self.gateways))
        finally:
            for gateway in self.gateways:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(gateway.pid, signal.SIGKILL)
        for process in (self._maker, *([] if self._engine is None else [self._engine])):
            assert process.stdin is not None  # type: ignore[attr-defined]
            process.stdin.close()  # type: ignore[attr-defined]
            process.wait(20)  # type: ignore[attr-defined]
        assert self._maker.stdout is not None
        self._maker.stdout.close()
        self.database.close()

    def start(self, gateway: LabGateway) -> None:
        assert self._maker.stdin is not None
        assert self._maker.stdout is not None
        self._maker.stdin.write(json.dumps(gateway.settings) + "\n")
        self._maker.stdin.flush()
        gateway.pid = int(self._maker.stdout.readline())

    def wait_ready(self, gateway: LabGateway) -> None:
        def is_ready() -> bool:
            if not Path(f"/proc/{gateway.pid}").exists():
                # On a busy machine, the gateway may exit because the engine answers too late. An init system would
                # restart it.
                self.start(gateway)
            try:
                url = f"http://127.0.0.1:{gateway.port}/health/ready"
                return httpx.get(url, trust_env=False, verify=False).status_code == 200
            except httpx.TransportError:
                return False

        until(is_ready, lambda: Path(gateway.settings["log"]).read_text()[-2000:])

    def stop(self, gateway: LabGateway) -> None:
        """Ask a gateway to stop, and wait until it and its child processes have exited."""
        children = children_of(gateway.pid)
        os.kill(gateway.pid, signal.SIGTERM)
        until(lambda: not Path(f"/proc/{gateway.pid}").exists())
        until(lambda: not any(map(is_running, children)), lambda: f"{children} outlived their gateway")

    def kill(self, gateway: LabGateway) -> None:
        """Kill a gateway, and wait until its child processes have noticed and exited."""
        children = children_of(gateway.pid)
        os.kill(gateway.pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{gateway.pid}").exists())
        until(lambda: not any(map(is_running, children)), lambda: f"{children} outlived their gateway")

    def account(self, slug: str) -> tuple[Tenant, str]:
        """A tenant with the lab's adapters and a monthly budget that counts all its tokens. Returns the tenant's key
        too.
        """
        tenant = Tenants(self.database).create(slug)
        allow(self.database, tenant.id)
        for name, template in LAB_ADAPTERS.items():
            files = None if template is None else {TEMPLATE_FILE: template.encode()}
            add_ready_adapter(self.database, tenant.id, name, [digest_of(name)], files, base_id=self.base_id)
        QuotaPolicies(self.database).set(tenant.id, TOKENS_PER_MONTH, 10**15)
        return tenant, ApiKeys(self.database).create(tenant.id, "key").secret

    def truths(self) -> defaultdict[str, Truth]:
        """What the engine noted about each request, or zero for requests that never reached the engine."""
        ends: defaultdict[str, list[NotedEnd]] = defaultdict(list)
        for end in self._ends():
            ends[end.sequence_id.rpartition("-")[0]].append(end)
        found: defaultdict[str, Truth] = defaultdict(lambda: Truth(0, 0))
        found.update((request_id, Truth.of(own)) for request_id, own in ends.items())
        return found

    def drafts_of(self, tenant_id: str) -> DraftCounts:
        """The drafts of a tenant's requests in the ledger."""
        truths = self.truths()
        return DraftCounts.of(end for request_id in self.events_of(tenant_id) for end in truths[request_id].ends)

    def _ends(self) -> Iterator[NotedEnd]:
        """The sequences that an engine has run."""
        yield from read_ends(self._directory / "ends")

    def see_reservations(self) -> None:
        """Make PostgreSQL record all later reservations, for `reserved_tokens` and `checkpoint_tokens`."""
        with self.database.write() as connection:
            connection.exec_driver_sql(_SEE_RESERVATIONS)

    def reserved_tokens(self, tenant_id: str) -> dict[str, int]:
        """The last number of tokens reserved for each of a tenant's requests, including settled requests."""
        return {row.id: row.reserved_tokens for row in self._seen_reservations(tenant_id)}

    def checkpoint_tokens(self, tenant_id: str) -> dict[str, int]:
        """The tokens that the last checkpoint recorded for each of a tenant's requests."""
        return {row.id: row.checkpoint_tokens for row in self._seen_reservations(tenant_id)}

    def _seen_reservations(self, tenant_id: str) -> Sequence[Any]:
        query = text("SELECT * FROM seen_reservations WHERE tenant_id = :tenant_id")
        with self.database.read() as connection:
            return connection.execute(query, {"tenant_id": tenant_id}).all()

    def num_open(self) -> int:
        table = schema.reservations
        with self.database.read() as connection:
            query = select(func.count()).select_from(table).where(table.c.state == "open")
            return int(connection.execute(query).scalar_one())

    def wait_settled(self, patience_s: float = PATIENCE_S) -> None:
        until(lambda: self.num_open() == 0, lambda: f"{self.num_open()} reservations are open", patience_s)

    def events_of(self, tenant_id: str) -> dict[str, Any]:
        events = schema.usage_events
        with self.database.read() as connection:
            return {row.request_id: row for row in connection.execute(select(events).filter_by(tenant_id=tenant_id))}

    def check_bills(self, tenant_id: str, answers: Iterable[tuple[int, bytes]]) -> int:
        """Check that the ledger, the usage in complete answers and the counters agree. Return the ledger's tokens.

        No request may be open.
        """
        events = self.events_of(tenant_id)
        for status, answer in answers:
            if (usage := usage_of(answer)) is not None:
                assert status == 200
                request_id, told = usage
                assert told == Truth(events[request_id].prompt_tokens, events[request_id].completion_tokens), request_id
        billed = sum(event.prompt_tokens + event.completion_tokens for event in events.values())
        adjustments, counters, policies = schema.usage_adjustments.c, schema.quota_counters.c, schema.quota_policies.c
        corrected = select(func.sum(adjustments.prompt_tokens + adjustments.completion_tokens))
        used = select(func.sum(counters.used)).where(
            counters.policy_id == policies.id, policies.subject_id == tenant_id, policies.metric == TOKENS_PER_MONTH
        )
        with self.database.read() as connection:
            billed += int(connection.execute(corrected.where(adjustments.tenant_id == tenant_id)).scalar() or 0)
            counted = int(connection.execute(used).scalar() or 0)
            held = connection.execute(select(counters.reserved)).scalars().all()
        assert counted == billed
        assert set(held) <= {0}, held
        return billed

    def check_predictions(self, tenant_id: str, told: Mapping[str, PredictionUsage]) -> int:
        """Check what the usage of requests said about their predictions. Return the number of tokens that were drafted
        from these. No request may be open.
        """
        events, truths = self.events_of(tenant_id), self.truths()
        wrong = {
            request_id: (said, truth)
            for request_id, said in told.items()
            if said != (truth := truths[request_id].predicted(events[request_id]))
        }
        assert not wrong
        return sum(said.accepted + said.rejected for said in told.values())

    def check_nothing_held(self) -> None:
        with self.database.read() as connection:
            held = connection.execute(select(schema.quota_counters.c.reserved)).scalars().all()
        assert set(held) <= {0}, held


async def ask(port: int, key: str, max_tokens: int, cut_after: int | None = None) -> tuple[int, bytes]:
    return await send(port, key, streamed_completion(max_tokens), cut_after)


async def send(port: int, key: str, request: DrawnRequest, cut_after: int | None = None) -> tuple[int, bytes]:
    """Send a request on a new connection. Return the status and everything that was received.

    With `cut_after`, disconnect after that many reads. The status is 0 if nothing was received.
    """
    body = json.dumps(request.body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        writer.write(
            f"POST {request.path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n".encode()
            + b"content-type: application/json\r\n"
            + f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n".encode()
            + (b"anthropic-version: 2026-10-21\r\n\r\n" if request.path == MESSAGES else b"\r\n")
            + body
        )
        num_reads = 0
        while cut_after is None or num_reads < cut_after:
            data = await reader.read(65536)
            if not data:
                break
            received += data
            num_reads += 1
    except ConnectionError:
        return 0, received
    finally:
        writer.transport.abort()
    return (int(received[9:12]) if received else 0), received


def usage_of(answer: bytes) -> tuple[str, Truth] | None:
    """Return the identifier and usage in a complete answer, or None for any other answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    # A stream of `/v1/responses` ends with the event that has the usage, and one of `/v1/messages` with an empty one.
    ends = (b"[DONE]", b"}") if b"\nevent: response." in body else (b"[DONE]", b'{"type":"message_stop"}')
    is_complete = body.rstrip(b"\r\n0").endswith(ends) if length is None else len(body) == int(length.group(1))
    usage = re.findall(rb'"prompt_tokens":(\d+),"completion_tokens":(\d+)', body)
    usage += [(num, b"0") for num in re.findall(rb'"usage":\{"prompt_tokens":(\d+),"total_tokens":', body)]
    usage += re.findall(rb'"input_tokens":(\d+),"input_tokens_details":\{[^}]*\},"output_tokens":(\d+)', body)
    told = re.findall(rb'"input_tokens":(\d+),"cache_\w+":0,"cache_\w+":(\d+),"output_tokens":(\d+)', body)
    # A stream of `/v1/messages` tells its usage twice. The last is final.
    usage += [(int(new) + int(cached), num) for new, cached, num in told[-1:]]
    if not is_complete or not usage:
        return None
    [request_id], [(num_prompt, num_completion)] = re.findall(rb"x-request-id: (\S+)", head), usage
    return request_id.decode(), Truth(int(num_prompt), int(num_completion))


def predictions_of(answers: Iterable[tuple[int, bytes]]) -> dict[str, PredictionUsage]:
    """What the usage in complete answers says about predictions, by request."""
    found: dict[str, PredictionUsage] = {}
    for _, answer in answers:
        counts = re.search(rb'"accepted_prediction_tokens":(\d+),"rejected_prediction_tokens":(\d+)', answer)
        usage = usage_of(answer)
        if usage is not None and counts is not None:
            found[usage[0]] = PredictionUsage(int(counts[1]), int(counts[2]))
    return found


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(is_so: Any, why: Any = lambda: "", patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


def make_lab_base(folder: Path, demo_base: Path) -> Path:
    model = make_tool_base(folder)
    config = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MAX_MODEL_LEN}))
    # The engine computes nothing with the weights, but gateways compare their digest.
    shutil.copy(demo_base / "model.safetensors", model)
    return model


@contextmanager
def gateway_lab(
    directory: Path, database_url: str, model: Path, num_gateways: int, disk: Path | None = None
) -> Iterator[GatewayLab]:
    lab = GatewayLab(directory, database_url, model, num_gateways, disk)
    try:
        yield lab
    finally:
        lab.close()
