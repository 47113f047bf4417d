"""Fixtures shared by the tests of all folders.

Database fixtures import their dependencies locally, because kernels and engine are also tested without them.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import shutil
import signal
import ssl
import sys
import tempfile
from collections.abc import Generator, Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.demo_base import DEMO_BASE
from tests.logged_records import LoggedRecords

if TYPE_CHECKING:
    from loramux.migrations.database import Database
    from tests.postgres import MigratedDatabases

# Set these before torch is imported. They make idle OpenMP threads go to sleep quickly, as in the engine process.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

LONG = ("tests/conformance/", "tests/kernels/", "tests/platform/tool_calls/", "tests/simulation/")
"""Paths of files that take long."""

TESTS = Path(__file__).parent

MEMORY = Path("/dev/shm")
# Databases and stores flush every commit, and thousands of tests wait for it. A file system in memory flushes nothing.
# Container runtimes often make it too small.
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


# peft imports bitsandbytes if it can, and with it torch's compiler, which takes over a second in each process of a test
# run. Only tests/adapter_store/formats/quantization/test_oracles.py needs it, and finds it again.
sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]


# Reading the certificates takes 20 ms, and thousands of tests create an HTTP client. No client changes its context.
ssl.create_default_context = cache(ssl.create_default_context)


# Reading the metadata of the distribution takes 4 ms, and each app of a listener shows its version.
importlib.metadata.version = cache(importlib.metadata.version)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LoggedRecords())
    if not (config.option.durations or config.option.xmlpath or config.option.verbose > 0):
        send_few_reports(config.pluginmanager)


def send_few_reports(plugins: pytest.PytestPluginManager) -> None:
    """Let a process of pytest-xdist send no starts and ends of tests, and no reports of setups and teardowns that have
    passed.

    They are four of six messages of a test. Only lists of durations, files of results and verbose output contain them.
    """
    for sender in [one for one in plugins.get_plugins() if type(one).__name__ == "WorkerInteractor"]:
        send = sender.pytest_runtest_logreport

        def pytest_runtest_logreport(report: pytest.TestReport, send: Any = send) -> None:
            if report.when == "call" or not report.passed:
                send(report=report)

        plugins.unregister(sender)
        sender.pytest_runtest_logstart = sender.pytest_runtest_logfinish = None
        sender.pytest_runtest_logreport = pytest_runtest_logreport
        plugins.register(sender)


# Collection creates millions of objects and drops few of them.
gc.disable()


def pytest_collection_finish() -> None:
    """Run the garbage collector rarely, and let it ignore the imported modules. It would take a sixth of the tests'
    time. A collection at this time would take a second and free little.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each process of pytest-xdist begin with another folder.

    In a new checkout, the first import of a test file rewrites its assertions, which takes a third of the time of
    collection. Processes that begin elsewhere find files that the others have rewritten.
    """
    report = yield
    if collector.path == TESTS and "PYTEST_XDIST_WORKER" in os.environ:
        worker, count = os.environ["PYTEST_XDIST_WORKER"], os.environ["PYTEST_XDIST_WORKER_COUNT"]
        files = [sum(1 for _ in node.path.rglob("test_*.py")) for node in report.result]
        start = sum(files) * int(worker.removeprefix("gw")) // int(count)
        first = sum(end <= start for end in accumulate(files))
        report.result = [*report.result[first:], *report.result[:first]]
    return report


CAMPAIGN_TESTS = pytest.StashKey[dict[str, frozenset[str]]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with long files, so that no process works on one at the end while the others are idle."""
    # Otherwise hypothesis parses every module of the product in each process, for constants that it sometimes draws.
    # Draws would depend on the imported modules.
    if providers := sys.modules.get("hypothesis.internal.conjecture.providers"):
        providers.is_local_module_file = lambda path: False  # type: ignore[attr-defined]
    # All processes must have the same order, whichever folder they began with.
    items.sort(key=lambda item: (not item.nodeid.startswith(LONG), item.nodeid.split("/")[1]))
    campaigns = [item for item in items if item.get_closest_marker("campaign")]
    config.stash[CAMPAIGN_TESTS] = {
        item.nodeid: frozenset(mark.name for mark in item.iter_markers()) for item in campaigns
    }


@pytest.fixture
def campaign_tests(pytestconfig: pytest.Config) -> dict[str, frozenset[str]]:
    """The names of the marks of each test that is marked `campaign`, among the tests that were collected."""
    return pytestconfig.stash[CAMPAIGN_TESTS]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Extend `--dist loadfile`."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.folder_scheduling import FolderScheduling

    return FolderScheduling(config, log)


KERNELS = "tests/kernels/"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make torch and the CPU kernels use one thread, except in the tests of the kernels.

    The matrices of other tests are so small that a second thread doubles the processor time, and other processes of the
    test run need the cores. An engine that is assembled with its default number of threads uses all of them again.
    """
    # Tests that import no kernels need not wait for torch.
    if "loramux.kernels.cpu.instructions.threads" in sys.modules:
        import numba

        from loramux.kernels.cpu.instructions.threads import set_num_threads

        most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        set_num_threads(most if item.nodeid.startswith(KERNELS) else 1)


@pytest.fixture(scope="session", autouse=True)
def heeded_signals() -> None:
    """Shells and nohup let what runs in the background ignore signals, and the processes of tests would inherit it."""
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)


@pytest.fixture(scope="session", autouse=True)
def compiled_statements() -> None:
    # Kernels and engine are also tested without SQLAlchemy.
    if "sqlalchemy" in sys.modules:
        from tests.compiled_statements import share_compiled_statements

        share_compiled_statements()


@pytest.fixture(scope="session", autouse=True)
def plain_tracebacks() -> None:
    """structlog's default shows every variable of every frame in colours, which takes seconds per logged exception."""
    if structlog := sys.modules.get("structlog"):
        for processor in structlog.get_config()["processors"]:
            if isinstance(processor, structlog.dev.ConsoleRenderer):
                processor.exception_formatter = structlog.dev.plain_traceback


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty directory with a short path, because a Unix socket's path may have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="lmx-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    from tests.postgres import running_server

    with running_server() as url:
        yield url


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    from tests.postgres import new_database

    with new_database(postgres_server, "template1") as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database. The test runs once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'loramux.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture(scope="session")
def postgres_template(postgres_server: str) -> str:
    """The name of a PostgreSQL database with the current schema, used as a template for other databases."""
    from tests.migrated import migrate
    from tests.postgres import create_database

    name = "migrated"
    migrate(create_database(postgres_server, name))
    return name


@pytest.fixture(scope="session")
def migrated_databases(postgres_server: str, postgres_template: str) -> Iterator[MigratedDatabases]:
    from tests.postgres import MigratedDatabases

    databases = MigratedDatabases(postgres_server, postgres_template)
    yield databases
    databases.close()


@pytest.fixture
def migrated_postgres_url(migrated_databases: MigratedDatabases) -> Iterator[str]:
    with migrated_databases.lent() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def migrated_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database with the current schema. The test runs once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        from tests.migrated import migrated_sqlite

        return migrated_sqlite(tmp_path / "loramux.db")
    return str(request.getfixturevalue("migrated_postgres_url"))


@pytest.fixture
def database(migrated_url: str) -> Iterator[Database]:
    from loramux.migrations.database import Database

    database = Database(migrated_url)
    yield database
    database.close()


@pytest.fixture(scope="session")
def demo_base() -> Path:
    return DEMO_BASE
