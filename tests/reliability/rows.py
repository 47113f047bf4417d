"""The rows of `make reliability`: what each runs at each size, and what its figures must show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.mutants.known import MUTANTS
from tests.reliability.record import Figures

SIZES = ("full", "small", "tiny")
"""`small` is about a twentieth of `full`. `tiny` only shows that a row works."""

BySize = tuple[str, str, str]
"""A value for each of SIZES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A module that `python -m` runs."""

    arguments: tuple[str, ...]
    settings: Mapping[str, BySize] = field(default_factory=dict)
    """Environment variables."""
    sized: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further arguments for some sizes."""
    environment: str | None = None
    """The virtual environment of `tests.environments` in which it runs. None means this one."""

    def words(self, size: str) -> tuple[str, ...]:
        return (*self.arguments, *self.sized.get(size, ()))

    def variables(self, size: str) -> dict[str, str]:
        return {name: values[SIZES.index(size)] for name, values in self.settings.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    unit: str
    """What the figure counts, as the table says it."""
    combine: Callable[[Iterable[float]], float] = sum
    """Makes one figure of those of several records."""
    at_least: float | None = None
    at_most: float | None = None
    full: float | None = None
    """The figure of a run at full size. Smaller runs pass too, but the table says their share."""

    def problem(self, value: float) -> str | None:
        if self.at_least is not None and value < self.at_least:
            return f"{self.unit}: {value:g} is less than {self.at_least:g}"
        if self.at_most is not None and value > self.at_most:
            return f"{self.unit}: {value:g} is more than {self.at_most:g}"
        if self.full is not None and value <= 0:
            return f"{self.unit}: none"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    title: str
    commands: tuple[Command, ...]
    figures: tuple[Figure, ...]
    is_timed: bool = False
    """It measures time, so other programs disturb it."""

    def combined(self, records: Sequence[Figures]) -> Figures:
        """One value for each figure that at least one record has."""
        values = {one.name: [record[one.name] for record in records if one.name in record] for one in self.figures}
        return {one.name: one.combine(values[one.name]) for one in self.figures if values[one.name]}

    def problems(self, figures: Figures) -> list[str]:
        """Why the figures do not show what the row promises. A figure that nothing recorded is a problem too."""
        missing = [f"{one.unit}: not recorded" for one in self.figures if one.name not in figures]
        found = (one.problem(figures[one.name]) for one in self.figures if one.name in figures)
        return missing + [problem for problem in found if problem is not None]


FAILURES = Figure(name="failures", unit="failed runs", at_most=0)


def _pytest(*tests: str, marks: str = "campaign") -> tuple[str, ...]:
    return ("pytest", *tests, "-m", marks, "-n", "0", "--timeout", "36000")


GATEWAYS = "campaign and not fleet and not cluster and not data_parallel"

ROWS: Mapping[str, Row] = {
    "simulation": Row(
        title="Simulated steps of the engine",
        commands=(
            Command(
                arguments=_pytest("tests/simulation"),
                settings={"LORAMUX_SIMULATION_TURNS": ("167000", "8400", "1000")},
            ),
        ),
        figures=(Figure(name="steps", unit="steps", full=6_000_000), FAILURES),
    ),
    "mutants": Row(
        title="Known faults that are put back",
        commands=(
            Command(
                arguments=("tests.mutants",),
                sized={"tiny": ("cached-tokens-billed-twice", "salt-collision", "slot-of-a-running-request")},
            ),
        ),
        figures=(
            Figure(name="mutants", unit="faults", full=len(MUTANTS)),
            Figure(name="missed", unit="not caught", at_most=0),
            FAILURES,
        ),
    ),
    "kills": Row(
        title="SIGKILL of gateways, servers, engines and ingestion",
        commands=(
            Command(
                arguments=_pytest(
                    "tests/conformance/test_gateways.py::"
                    "test_gateways_killed_at_random_moments_settle_each_request_once",
                    marks=GATEWAYS,
                ),
                settings={"LORAMUX_GATEWAY_KILLS": ("5000", "250", "6")},
            ),
            Command(
                arguments=_pytest("tests/conformance/test_fleet.py", marks="campaign and fleet"),
                settings={
                    "LORAMUX_FLEET_KILLS": ("500", "25", "2"),
                    "LORAMUX_FLEET_ENGINE_KILLS": ("500", "25", "2"),
                    "LORAMUX_FLEET_UPGRADES": ("6", "3", "1"),
                },
            ),
            Command(
                arguments=_pytest(
                    "tests/adapter_store/ingest/test_ingest_crashes.py::test_server_killed_at_any_time_loses_nothing"
                ),
                settings={"LORAMUX_INGEST_SEEDS": ("1000", "50", "1")},
            ),
        ),
        figures=(
            Figure(name="kills", unit="kills", full=10_000),
            Figure(name="lost", unit="acknowledged, then lost", at_most=0),
            Figure(name="unsettled", unit="not settled exactly once", at_most=0),
            Figure(name="undercounted", unit="billed less than promised", at_most=0),
            FAILURES,
        ),
    ),
    "store-faults": Row(
        title="Faults of the object store",
        commands=(
            Command(
                arguments=_pytest("tests/conformance/test_store_faults.py"),
                settings={"LORAMUX_STORE_FAULTS": ("12000", "600", "60")},
            ),
        ),
        figures=(
            Figure(name="faults", unit="faults", full=12_000),
            Figure(name="kinds", unit="kinds of faults", combine=max),
            Figure(name="wrong", unit="wrong answers", at_most=0),
            Figure(name="resident_share", unit="success of resident adapters", combine=min, at_least=0.999),
            FAILURES,
        ),
    ),
    "isolation": Row(
        title="Requests beside hostile adapters",
        commands=(
            Command(
                arguments=_pytest("tests/reliability/test_isolation.py"),
                settings={"LORAMUX_ISOLATION_REQUESTS": ("10000", "500", "60")},
            ),
        ),
        figures=(
            Figure(name="requests", unit="requests", full=10_000),
            Figure(name="hostile", unit="hostile requests beside them"),
            Figure(name="changed", unit="differ from their solo run", at_most=0),
            FAILURES,
        ),
    ),
    "database-faults": Row(
        title="Faults of the database",
        commands=(
            Command(
                arguments=_pytest("tests/conformance/test_database_faults.py"),
                settings={"LORAMUX_DATABASE_FAULTS": ("12000", "600", "60")},
            ),
        ),
        figures=(
            Figure(name="faults", unit="faults", full=12_000),
            Figure(name="kinds", unit="kinds of faults", combine=max),
            Figure(name="answers", unit="whole answers"),
            Figure(name="wrong_bills", unit="wrong bills", at_most=0),
            Figure(name="lost", unit="acknowledged, then lost", at_most=0),
            Figure(name="cut", unit="streams cut", at_most=0),
            Figure(name="recovery_s", unit="s until all gateways answered again (slowest)", combine=max, at_most=30),
            FAILURES,
        ),
    ),
    "side-channels": Row(
        title="Time to first token as a side channel",
        is_timed=True,
        commands=(
            Command(
                arguments=_pytest("tests/reliability/test_side_channels.py"),
                settings={"LORAMUX_SIDE_CHANNEL_PAIRS": ("10000", "500", "100")},
            ),
        ),
        figures=(
            Figure(name="pairs", unit="pairs", full=10_000),
            Figure(name="other_tenant_auc", unit="AUC, other tenant", combine=max, at_least=0.47, at_most=0.53),
            Figure(name="same_tenant_auc", unit="AUC, same tenant", combine=min, at_least=0.95),
            FAILURES,
        ),
    ),
    "http-side-channels": Row(
        title="Time to first token as a side channel, over HTTP",
        is_timed=True,
        commands=(
            Command(
                arguments=_pytest("tests/reliability/test_http_side_channels.py"),
                settings={"LORAMUX_HTTP_SIDE_CHANNEL_PAIRS": ("10000", "500", "100")},
            ),
        ),
        figures=(
            Figure(name="pairs", unit="pairs", full=10_000),
            Figure(name="other_tenant_auc", unit="AUC, other tenant", combine=max, at_least=0.47, at_most=0.53),
            Figure(name="same_tenant_auc", unit="AUC, same tenant", combine=min, at_least=0.95),
            FAILURES,
        ),
    ),
    "disconnects": Row(
        title="Clients that disconnect",
        is_timed=True,
        commands=(
            Command(
                arguments=_pytest(
                    "tests/conformance/test_gateways.py::"
                    "test_streams_cut_at_random_points_are_charged_what_the_engine_committed",
                    marks=GATEWAYS,
                ),
                settings={"LORAMUX_GATEWAY_CUTS": ("17000", "850", "60")},
            ),
            Command(
                arguments=_pytest("tests/reliability/test_disconnects.py"),
                settings={"LORAMUX_DISCONNECTS": ("2000", "100", "20")},
            ),
        ),
        figures=(
            Figure(name="disconnects", unit="disconnects", full=10_000),
            Figure(name="wrong_bills", unit="wrong bills", at_most=0),
            Figure(name="leaked_pages", unit="leaked pages", at_most=0),
            Figure(name="slowest_ms", unit="ms until the pages were free (slowest)", combine=max, at_most=500),
            FAILURES,
        ),
    ),
    "stops": Row(
        title="SIGTERM of gateways under load",
        commands=(
            Command(
                arguments=_pytest(
                    "tests/conformance/test_gateways.py::test_gateways_stopped_under_load_finish_their_streams",
                    marks=GATEWAYS,
                ),
                settings={"LORAMUX_GATEWAY_STOPS": ("1000", "50", "4")},
            ),
        ),
        figures=(
            Figure(name="stops", unit="stops", full=1_000),
            Figure(name="cut", unit="streams cut", at_most=0),
            Figure(name="wrong_bills", unit="wrong bills", at_most=0),
            FAILURES,
        ),
    ),
    "overload": Row(
        title="Ten times the load that the server can serve",
        is_timed=True,
        commands=(
            Command(
                arguments=("tests.reliability.overload",),
                sized={
                    "small": ("--minutes", "5"),
                    "tiny": ("--base", "demo", "--tenants", "10", "--adapters", "20", "--minutes", "0.5"),
                },
            ),
        ),
        figures=(
            Figure(name="minutes", unit="minutes", full=30),
            Figure(name="tenants", unit="tenants", combine=max, full=500),
            Figure(name="adapters", unit="adapters", combine=max, full=2000),
            Figure(name="capacity", unit="requests per second at capacity", combine=min),
            Figure(name="refused", unit="refusals"),
            Figure(name="goodput_share", unit="of the goodput at capacity", combine=min, at_least=0.9),
            Figure(name="refusal_p99_ms", unit="ms until a refusal (p99)", combine=max, at_most=50),
            Figure(
                name="polite_ratio",
                unit="times as long to the first token of polite tenants of the tier priority as beside nine tenths of "
                "the capacity (p99)",
                combine=max,
                at_most=1.25,
            ),
            Figure(
                name="polite_refused_share",
                unit="of the requests of polite tenants of the tier priority were refused",
                combine=max,
            ),
            Figure(
                name="polite_default_refused_share",
                unit="of the requests of polite tenants of the tier default were refused",
                combine=max,
            ),
            Figure(name="growing", unit="processes whose memory grew", at_most=0),
            FAILURES,
        ),
    ),
    "soak": Row(
        title="Hours of mixed traffic",
        commands=(
            Command(
                arguments=("tests.reliability.soak",),
                sized={
                    "full": ("--hours", "8"),
                    "small": ("--hours", "1"),
                    "tiny": ("--hours", "0.02"),
                },
            ),
        ),
        figures=(
            Figure(name="hours", unit="hours", full=8),
            Figure(name="requests", unit="requests"),
            Figure(name="failed", unit="failed", at_most=0),
            Figure(name="series", unit="series of memory, descriptors, threads, rows and files"),
            Figure(name="growing", unit="grew", at_most=0),
            FAILURES,
        ),
    ),
    "api": Row(
        title="Random calls of both listeners",
        commands=(
            Command(
                arguments=_pytest("tests/admin/rest/test_api_conformance.py"),
                # Many operations have fewer different cases, so that about three fifths of the calls are made.
                settings={"LORAMUX_API_CASES": ("340000", "17000", "400")},
            ),
        ),
        figures=(
            Figure(name="calls", unit="calls", full=200_000),
            Figure(name="server_errors", unit="5xx", at_most=0),
            FAILURES,
        ),
    ),
    "readers": Row(
        title="Mutated files and answers",
        commands=(
            Command(
                arguments=("tests.reliability.fuzzing",),
                sized={
                    "full": ("--runs", "10000000"),
                    "small": ("--runs", "200000"),
                    "tiny": ("--runs", "5000"),
                },
            ),
        ),
        figures=(
            Figure(name="executions", unit="executions", full=50_000_000),
            Figure(name="crashes", unit="crashes", at_most=0),
            Figure(name="slow", unit="took over 1 s of processor time", at_most=0),
            Figure(name="large", unit="took over 256 MB", at_most=0),
            FAILURES,
        ),
    ),
}
