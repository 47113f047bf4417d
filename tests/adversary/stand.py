from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import boto3
import httpx
from botocore.exceptions import BotoCoreError, ClientError
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import func, select, text
from tokenizers import Tokenizer

from benchmarks.accounts.databases import open_database_at
from loramux.migrations import schema
from loramux.migrations.database import Database
from tests.adversary.many_end_users import add_end_users
from tests.conformance.demo_adapters import DEMO, changed_adapter
from tests.conformance.served import Deployment, deployment
from tests.platform.tool_base import TEMPLATE as TOOL_TEMPLATE
from tests.ports import free_port

BASE, ADAPTER, CHATTER = "demo-base", "support", "chatter"
"""CHATTER is an adapter with a chat template of its own."""
COSTLY_WORD, HUGE_WORD = "costly", "huge"
"""The templates of the crowd's adapters take much time or memory if a message contains one of these words."""
POLITE_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
COSTLY_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if '{COSTLY_WORD}' in message['content'] %}}"
    "{% for x in range(99999) %}{% for y in range(99999) %}{% set z = x * y %}{% endfor %}{% endfor %}"
    "{% endif %}"
    f"{{% if '{HUGE_WORD}' in message['content'] %}}{{{{ ('a' * 9999999) ~ ('b' * 99999999) }}}}{{% endif %}}"
    "{{ message['content'] }}{% endfor %}"
)
DATABASES = ("sqlite", "postgresql")
NUM_SOCKETS = 1000
"""Number of connections per socket attack."""
NUM_END_USERS = 150_000
"""Number of the attacker's events in the ledger, each with a different end user."""
PATIENCE_S = 90.0
_DATABASE_FILE = "loramux.db"


@dataclass(frozen=True, slots=True)
class Account:
    slug: str
    tenant_id: str
    key: str
    """Secret of a key that may call adapters and the base."""
    admin_key: str
    """Secret of a key with `tenant:admin`."""
    reader_key: str
    """Secret of a key with `tenant:read`."""


@dataclass(frozen=True, slots=True)
class Stand:
    deployment: Deployment
    server: subprocess.Popen[str]
    database: Database
    polite: Account
    attacker: Account
    crowd: list[Account]
    """Further attackers."""
    bang: int
    """The token for an exclamation mark."""
    directory: Path
    """Directory for files that the attacks create."""
    billed_before: int
    """Completion tokens in the ledger before the attacks."""
    s3_port: int | None = None
    """Port of the S3 server, or None if files are stored on disk."""
    notes: list[str] = field(default_factory=list)
    """Remarks on attacks, shown in addition to the counts."""
    undocumented: Counter[str] = field(default_factory=Counter)
    """Number of violations, such as undocumented responses, by description. Attacks add to this counter."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.deployment.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.deployment.admin_port}"

    @property
    def operator(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.deployment.admin_key}"}

    def adapter_id(self, account: Account) -> str:
        answer = httpx.get(
            f"{self.admin_url}/admin/v1/adapters",
            params={"tenant": account.slug},
            headers=self.operator,
            trust_env=False,
            timeout=30,
        )
        return next(str(one["id"]) for one in answer.json()["data"] if one["name"] == ADAPTER)

    def num_billed(self) -> int:
        events, adjustments = schema.usage_events.c, schema.usage_adjustments.c
        with self.database.read() as connection:
            # PostgreSQL's sums are decimals.
            return sum(
                int(connection.execute(select(func.coalesce(func.sum(column), 0))).scalar_one())
                for column in (events.completion_tokens, adjustments.completion_tokens)
            )

    def metrics(self) -> dict[tuple[str, tuple[str, ...]], float]:
        shown = httpx.get(f"{self.admin_url}/metrics", trust_env=False, timeout=10).text
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(shown)
            for sample in family.samples
        }

    def num_descriptors(self) -> Counter[str]:
        """Open descriptors of the server and of its child processes by kind, without the connection pools of the
        database and of S3.

        The processes are counted too, because the server has descriptors for each.
        """
        processes = _processes(self.server.pid)
        pooled = set() if self.s3_port is None else _sockets_to(self.s3_port)
        found = Counter({"child processes": len(processes) - 1, "server: database": -self._num_database_descriptors()})
        for pid in processes:
            whose = "server" if pid == self.server.pid else "children"
            found.update(f"{whose}: {self._kind(target)}" for target in _descriptors(pid) if target not in pooled)
        return found

    def _kind(self, target: str) -> str:
        if _DATABASE_FILE in target and self.database.is_sqlite:
            return "database"
        # Cut off the number of a pipe or socket, and of a temporary file, which a restarted child process opens again.
        return target.partition(":[")[0].partition("/#")[0]

    def _num_database_descriptors(self) -> int:
        """Number of open SQLite files or PostgreSQL connections. It grows with concurrency and never shrinks."""
        if not self.database.is_sqlite:
            query = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
            with self.database.read() as connection:
                # Exclude the connection that runs this query.
                return int(connection.execute(query).scalar_one()) - 1
        descriptors = Path(f"/proc/{self.server.pid}/fd").iterdir()
        return sum(_DATABASE_FILE in os.readlink(one) for one in descriptors if one.is_symlink())

    def wait_idle(self) -> None:
        """Wait until no reservation is open and no version is pending."""
        wait_until(lambda: not self._under_way(), lambda: f"still under way: {self._under_way()}")

    def _under_way(self) -> dict[str, int]:
        reservations, versions = schema.reservations, schema.adapter_versions
        with self.database.read() as connection:
            num_open = connection.execute(
                select(func.count()).select_from(reservations).where(reservations.c.state == "open")
            ).scalar_one()
            num_pending = connection.execute(
                select(func.count()).select_from(versions).where(versions.c.state.in_(("pending", "validating")))
            ).scalar_one()
        return {what: number for what, number in (("reservations", num_open), ("versions", num_pending)) if number}


@contextmanager
def open_stand(kind: str) -> Iterator[Stand]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loramux-adversary-")))
        # Limit the engine to one thread, so that the gateway's event loop has a core to itself.
        environment = {"LORAMUX_NUM_THREADS": "1"}
        arguments: tuple[str, ...] = ()
        s3_port = None
        if kind == "postgresql":
            _, url = stack.enter_context(open_database_at(kind))
            s3_port = free_port()
            environment |= stack.enter_context(_s3(directory, s3_port))
            arguments = ("--database-url", url, "--blob-url", "s3://loramux-adversary/models")
        else:
            url = f"sqlite:///{directory / 'data' / 'loramux.db'}"
        base = shutil.copytree(DEMO / "base", directory / "base")
        # A prompt that contained the schemas of a flood would be too long.
        template = TOOL_TEMPLATE.replace("tool.function | tojson", "tool.function.name")
        (base / "chat_template.jinja").write_text(template)
        made = deployment(base, directory / "data", arguments, environment)
        with made.running(directory / "first.log"):
            accounts = [_account(made, slug) for slug in ("polite", "mallory", *(f"crowd-{n}" for n in range(6)))]
            for number, account in enumerate(accounts):
                files = changed_adapter(directory / account.slug, 1 + number / 50)
                made.json("adapters", "push", str(files), "--tenant", account.slug, "--name", ADAPTER)
                template = POLITE_TEMPLATE if number == 0 else COSTLY_TEMPLATE
                (files / "chat_template.jinja").write_text(template)
                made.json("adapters", "push", str(files), "--tenant", account.slug, "--name", CHATTER)
        database = Database(url)
        stack.callback(database.close)
        add_end_users(database, accounts[1].tenant_id, NUM_END_USERS)
        server = stack.enter_context(made.running(directory / "server.log"))
        bang = Tokenizer.from_file(str(DEMO / "base" / "tokenizer.json")).token_to_id("!")
        polite, attacker, *crowd = accounts
        stand = Stand(
            made, server, database, polite, attacker, crowd, bang, directory, billed_before=0, s3_port=s3_port
        )
        yield dataclasses.replace(stand, billed_before=stand.num_billed())


def wait_until(is_so: Callable[[], bool], why: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(why())
        time.sleep(0.1)


def _account(made: Deployment, slug: str) -> Account:
    tenant_id = made.json("tenants", "create", slug)["id"]

    def key(*scopes: str) -> str:
        options = [option for scope in scopes for option in ("--scope", scope)]
        return str(made.json("keys", "create", "--tenant", slug, *options)["secret"])

    return Account(slug, tenant_id, key(), key("tenant:admin"), key("tenant:read"))


def _sockets_to(port: int) -> set[str]:
    """The sockets of this machine that are connected to this port of 127.0.0.1, as links of descriptors name them."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {f"socket:[{fields[9]}]" for fields in lines if fields[2] == f"0100007F:{port:04X}"}


def _descriptors(pid: int) -> Iterator[str]:
    """The links of a process's open descriptors, or nothing if the process has ended."""
    with contextlib.suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            # A descriptor may be closed before its link is read.
            with contextlib.suppress(OSError):
                yield os.readlink(one)


def _processes(pid: int) -> list[int]:
    """The process and its descendants, except forks, which serve one tenant for a time."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            children = [int(one) for task in Path(f"/proc/{parent}/task").iterdir() for one in _children(task)]
            found += [one for one in children if _command(one) != _command(parent)]
    return found


def _children(task: Path) -> list[str]:
    return (task / "children").read_text().split()


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@contextmanager
def _s3(directory: Path, port: int) -> Iterator[dict[str, str]]:
    """Run an S3 server that uses only idle CPU time: a real one has its own machine."""
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with (directory / "s3.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.adversary.s3_server", str(port)], stdout=log, stderr=log
        )
    os.sched_setscheduler(server.pid, os.SCHED_IDLE, os.sched_param(0))
    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )

    def is_made() -> bool:
        try:
            client.create_bucket(Bucket="loramux-adversary")
        except (BotoCoreError, ClientError):
            return False
        return True

    try:
        wait_until(is_made, lambda: "the S3 server did not start")
        yield environment
    finally:
        server.terminate()
        server.wait(20)
