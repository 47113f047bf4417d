from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest

from loramux.engine.protocol.messages import Add, AnswerT, EngineCall, Finished, SequenceOutput
from loramux.platform.base_draw import BaseOrder
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.sequence_stream import SequenceStream
from loramux.platform.replicas.route import routing_request
from loramux.platform.replicas.routed_engine import RoutedEngine
from loramux.platform.routing.views import ReplicaView
from tests.platform.ready_adapters import digest_of
from tests.platform.replicas.lab import ChosenRouter, add, collect, until
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio


class LosableEngine(ScriptedEngine):
    """An engine whose connection can be lost, which ends its sequences as a real loss would."""

    def __init__(self, max_model_len: int = 1024) -> None:
        super().__init__(max_model_len=max_model_len)
        self.streams: list[SequenceStream] = []

    def submit(self, add: Add, order: BaseOrder | None = None) -> AsyncIterator[SequenceOutput | Finished]:
        if not self.is_ready:
            raise EngineUnavailable("the engine is not running")
        self.adds.append(add)
        self.streams.append(SequenceStream(add))
        return self.streams[-1]

    def lose(self, was_running: bool = False) -> None:
        self.die()
        for stream in self.streams:
            stream.fail(was_running)


class DyingEngine(LosableEngine):
    """An engine that is lost as soon as it gets a sequence."""

    def submit(self, add: Add, order: BaseOrder | None = None) -> AsyncIterator[SequenceOutput | Finished]:
        stream = super().submit(add)
        self.lose()
        return stream


class RefusingEngine(ScriptedEngine):
    def __init__(self, code: str) -> None:
        super().__init__()
        self._code = code

    def submit(self, add: Add, order: BaseOrder | None = None) -> AsyncIterator[SequenceOutput | Finished]:
        self.adds.append(add)
        stream = SequenceStream(add)
        stream.put(
            Finished(
                sequence_id=add.sequence_id,
                reason="error",
                prompt_tokens=0,
                completion_tokens=0,
                code=self._code,
            )
        )
        return stream


def view(
    name: str, *holds: int, is_draining: bool = False, num_running: int = 0, base_id: str | None = None
) -> ReplicaView:
    return ReplicaView(
        id=name,
        is_local=name == "local",
        base_id=base_id,
        num_running=num_running,
        num_waiting=0,
        capacity=8,
        pages_free_fraction=1.0,
        is_draining=is_draining,
        holds=frozenset(holds),
        since_s=0.0,
    )


class Fleet:
    """A routed engine that prefers `peer`, then `other`, then its own."""

    def __init__(self) -> None:
        self.local, self.other = ScriptedEngine(), ScriptedEngine()
        self.peer = LosableEngine()
        self.router = ChosenRouter(["peer", "other", "local"])
        self.outcomes: Counter[str] = Counter()
        self.num_fallbacks = 0
        self.engine = RoutedEngine(
            self.local,
            "local",
            lambda: self.router,
            lambda outcome: self.outcomes.update([outcome]),
            self.note_fallback,
        )
        self.report()

    def note_fallback(self) -> None:
        self.num_fallbacks += 1

    def report(self) -> None:
        views = [view(name) for name in ("local", "peer", "other")]
        self.engine.update(views, {"peer": self.peer, "other": self.other})


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


async def test_unstarted_sequence_moves_with_its_id_and_limit(fleet: Fleet) -> None:
    stream = fleet.engine.submit(add("one", 4))
    fleet.engine.extend("one", 6)
    fleet.peer.lose()
    tokens, end = await collect(stream)
    assert tokens == [5, 6, 7, 5, 6, 7]
    assert (end.reason, end.completion_tokens) == ("length", 6)
    assert fleet.other.adds == [add("one", 6)]
    assert fleet.outcomes == {"moved": 1, "completed": 1}
    assert fleet.router.in_flight == []
    # A lost replica gets nothing until it is reported again.
    assert [one.id for one in fleet.router.views] == ["local", "other"]


@pytest.mark.parametrize("why", ["started", "ran", "aborted"])
async def test_sequence_that_may_have_run_ends_with_the_error(fleet: Fleet, why: str) -> None:
    stream = fleet.engine.submit(add("one"))
    if why == "started":
        fleet.peer.streams[0].put(SequenceOutput(sequence_id="one", token_ids=(7,)))
        assert isinstance(await anext(stream), SequenceOutput)
    elif why == "aborted":
        fleet.engine.abort("one")
    fleet.peer.lose(was_running=why == "ran")
    _, end = await collect(stream)
    assert (end.reason, end.code) == ("error", "engine_unavailable")
    assert (fleet.other.adds, fleet.local.adds) == ([], [])
    assert fleet.outcomes == {"lost": 1}
    assert fleet.router.in_flight == []


async def test_waiting_sequence_of_the_own_dead_engine_runs_elsewhere() -> None:
    local, peer = LosableEngine(), ScriptedEngine()
    engine = RoutedEngine(local, "local", lambda: ChosenRouter(["local"]), lambda outcome: None, lambda: None)
    engine.update([view("local"), view("peer")], {"peer": peer})
    stream = engine.submit(add("one"))
    local.lose()
    assert (await collect(stream))[1].reason == "length"
    assert [one.sequence_id for one in peer.adds] == ["one"]
    # The server still accepts requests, and still knows the limits of its engine.
    assert engine.is_ready
    assert engine.info is not None
    assert (await collect(engine.submit(add("two"))))[1].reason == "length"


async def test_sequence_that_replicas_keep_losing_is_given_up(fleet: Fleet) -> None:
    fleet.router.wanted = ["first", "second", "third"]
    engines = {name: DyingEngine() for name in fleet.router.wanted}
    fleet.engine.update([view("local"), *map(view, engines)], engines)
    assert (await collect(fleet.engine.submit(add("one"))))[1].code == "engine_unavailable"
    assert fleet.outcomes == {"moved": 2, "lost": 1}
    assert not fleet.local.adds


async def test_sequence_that_draining_replicas_refuse_runs_here(fleet: Fleet) -> None:
    fleet.router.wanted = ["first", "second", "third"]
    engines = {name: RefusingEngine("replica_draining") for name in fleet.router.wanted}
    fleet.engine.update([view("local"), *map(view, engines)], engines)
    assert (await collect(fleet.engine.submit(add("one"))))[1].reason == "length"
    assert fleet.outcomes == {"moved": 3}
    assert fleet.local.adds == [add("one")]


async def test_sequence_that_full_queues_refuse_runs_where_slots_are_free(fleet: Fleet) -> None:
    fleet.router.wanted = ["full"]
    full, also_full, busy = RefusingEngine("overloaded"), RefusingEngine("overloaded"), ScriptedEngine()
    views = [view("local", num_running=7), view("full"), view("also full", num_running=6), view("busy", num_running=8)]
    fleet.engine.update(views, {"full": full, "also full": also_full, "busy": busy})
    _, end = await collect(fleet.engine.submit(add("one")))
    assert end.reason == "length"
    assert (len(full.adds), len(also_full.adds), len(busy.adds)) == (1, 1, 0)
    assert fleet.local.adds == [add("one")]
    assert fleet.outcomes == {"moved": 2}
    assert fleet.router.in_flight == []


@pytest.mark.parametrize("why", ["busy", "draining", "too small", "full"])
async def test_overloaded_sequence_ends_if_no_replica_can_start_it(fleet: Fleet, why: str) -> None:
    fleet.router.wanted = ["full"]
    full = RefusingEngine("overloaded")
    other = (
        RefusingEngine("overloaded")
        if why == "full"
        else ScriptedEngine(max_model_len=8 if why == "too small" else 1024)
    )
    other_view = view("other", is_draining=why == "draining", num_running=8 if why == "busy" else 0)
    views = [view("local", num_running=8), view("full"), other_view]
    fleet.engine.update(views, {"full": full, "other": other})
    _, end = await collect(fleet.engine.submit(add("one", 8)))
    assert (end.reason, end.code) == ("error", "overloaded")
    assert len(other.adds) == (1 if why == "full" else 0)
    assert not fleet.local.adds
    assert fleet.router.in_flight == []


async def test_request_too_long_for_the_chosen_replica_runs_here(fleet: Fleet) -> None:
    fleet.router.wanted = ["small"]
    small = ScriptedEngine(max_model_len=16)
    fleet.engine.update([view("local"), view("small")], {"small": small})
    await collect(fleet.engine.submit(add("fits", 13)))
    await collect(fleet.engine.submit(add("does not", 14)))
    assert [one.sequence_id for one in small.adds] == ["fits"]
    assert [one.sequence_id for one in fleet.local.adds] == ["does not"]


async def test_without_any_engine_nothing_is_accepted(fleet: Fleet) -> None:
    for engine in (fleet.local, fleet.peer, fleet.other):
        engine.die()
    assert not fleet.engine.is_ready
    assert fleet.engine.info is None
    with pytest.raises(EngineUnavailable):
        fleet.engine.submit(add("one"))
    assert fleet.router.in_flight == []


async def test_behind_a_picker_sequences_of_this_base_stay_here() -> None:
    local, peer, new = LosableEngine(), ScriptedEngine(), ScriptedEngine()
    engine = RoutedEngine(
        local,
        "local",
        lambda: ChosenRouter(["peer", "local"]),
        lambda outcome: None,
        lambda: None,
        base_id="old",
        is_own_only=True,
    )
    digest = digest_of("one")
    views = [view("local", base_id="old"), view("peer", int(digest[:16], 16), base_id="old")]
    engine.update([*views, view("new", base_id="new")], {"peer": peer, "new": new})
    waiting = engine.submit(add("one"))
    assert [one.sequence_id for one in local.adds] == ["one"]
    assert not engine.holds_elsewhere(digest), "adapters that others hold are loaded here"
    order = BaseOrder(drawn="new", bases=("new",), own="old")
    await collect(engine.submit(add("two"), order))
    assert [one.sequence_id for one in new.adds] == ["two"]
    # The picker learns from the health check that this server has no engine now.
    local.lose()
    assert (await collect(waiting))[1].code == "engine_unavailable"
    assert not engine.is_ready
    with pytest.raises(EngineUnavailable):
        engine.submit(add("three"))
    assert not peer.adds


async def test_behind_a_picker_an_overloaded_sequence_is_refused() -> None:
    local, peer = RefusingEngine("overloaded"), ScriptedEngine()
    engine = RoutedEngine(local, "local", ChosenRouter, lambda outcome: None, lambda: None, is_own_only=True)
    engine.update([view("local", num_running=8), view("peer")], {"peer": peer})
    assert (await collect(engine.submit(add("one"))))[1].code == "overloaded"
    assert not peer.adds


async def test_stopped_reader_leaves_nothing_behind(fleet: Fleet) -> None:
    stream = fleet.engine.submit(add("one"))
    fleet.peer.streams[0].put(SequenceOutput(sequence_id="one", token_ids=(7,)))
    await anext(stream)
    assert fleet.router.in_flight == ["peer"]
    await stream.aclose()  # type: ignore[attr-defined]
    assert fleet.router.in_flight == []


class TwoBases:
    """A server of the base `old`, and two of the base `new`, `large` and `small`."""

    def __init__(self) -> None:
        self.local, self.large, self.small = LosableEngine(), LosableEngine(), LosableEngine(max_model_len=16)
        self.num_fallbacks = 0
        self.routers: list[ChosenRouter] = []
        self.drawn_bases: tuple[str, ...] = ()
        self.engine = RoutedEngine(
            self.local,
            "local",
            self.new_router,
            lambda outcome: None,
            self.note_fallback,
            base_id="old",
            drawn_bases=lambda: self.drawn_bases,
        )
        self.report(view("local", base_id="old"), view("large", base_id="new"), view("small", base_id="new"))

    def new_router(self) -> ChosenRouter:
        self.routers.append(ChosenRouter())
        return self.routers[-1]

    def note_fallback(self) -> None:
        self.num_fallbacks += 1

    def report(self, *views: ReplicaView) -> None:
        self.engine.update(views, {"large": self.large, "small": self.small})

    def submit(self, *bases: str, max_tokens: int = 4, drawn: str = "new") -> AsyncIterator[object]:
        order = BaseOrder(drawn=drawn, bases=bases, own="old")
        return self.engine.submit(add("one", max_tokens), order)

    @property
    def num_adds(self) -> tuple[int, int, int]:
        return len(self.local.adds), len(self.large.adds), len(self.small.adds)


@pytest.fixture
def two() -> TwoBases:
    return TwoBases()


def test_sequence_runs_on_the_first_base_that_can_run_it(two: TwoBases) -> None:
    two.submit("new", "old")
    assert two.num_adds == (0, 1, 0)
    two.submit("old", "new", drawn="old")
    assert two.num_adds == (1, 1, 0)
    assert two.num_fallbacks == 0
    # The adapter is not valid for the drawn base.
    two.submit("old")
    assert (two.num_adds, two.num_fallbacks) == ((2, 1, 0), 1)
    # No server of the drawn base takes the sequence: they are draining, or their context is too small.
    two.report(
        view("local", base_id="old"), view("large", is_draining=True, base_id="new"), view("small", base_id="new")
    )
    two.submit("new", "old", max_tokens=20)
    assert (two.num_adds, two.num_fallbacks) == ((3, 1, 0), 2)
    two.report(view("local", base_id="old"))
    two.submit("new", "old")
    assert (two.num_adds, two.num_fallbacks) == ((4, 1, 0), 3)
    assert [sorted(router.in_flight) for router in two.routers] == [["local"] * 4, ["large"]]


def test_no_sequence_runs_on_a_base_that_its_adapter_is_not_valid_for(two: TwoBases) -> None:
    two.report(view("local", base_id="old"))
    with pytest.raises(EngineUnavailable):
        two.submit("new")
    two.large.die()
    two.report(view("local", base_id="old"), view("large", base_id="new"))
    with pytest.raises(EngineUnavailable):
        two.submit("new")
    assert two.num_adds == (0, 0, 0)


def test_only_servers_that_accept_requests_of_this_base_keep_a_server_ready(two: TwoBases) -> None:
    old = view("small", base_id="old")
    two.report(view("local", base_id="old"), view("large", base_id="new"), old)
    two.local.die()
    assert two.engine.is_ready
    two.report(view("large", base_id="new"), replace(old, is_draining=True))
    assert not two.engine.is_ready
    two.drawn_bases = ("old", "new")
    assert two.engine.is_ready, "requests are divided between the bases"
    two.report()
    assert not two.engine.is_ready, "a refused server is not reported"


async def test_unstarted_sequence_of_a_lost_server_stays_with_its_base(two: TwoBases) -> None:
    stream = two.submit("new", "old")
    following = asyncio.ensure_future(anext(aiter(stream)))
    two.large.lose()
    await until(lambda: two.num_adds == (0, 1, 1))
    assert two.num_fallbacks == 0
    two.small.lose()
    await until(lambda: two.num_adds == (1, 1, 1))
    assert two.num_fallbacks == 1
    two.local.streams[0].put(SequenceOutput(sequence_id="one", token_ids=(7,)))
    assert await following == SequenceOutput(sequence_id="one", token_ids=(7,))


def test_each_base_has_its_own_holders(two: TwoBases) -> None:
    digest = digest_of("one")
    prefix = int(digest[:16], 16)
    two.report(view("local", prefix, base_id="old"), view("large", prefix, base_id="new"))
    assert [two.engine.holds_elsewhere(digest, base) for base in (None, "old", "new", "third")] == [
        False,
        False,
        True,
        False,
    ]


def test_draining_replica_holds_nothing_for_new_requests(fleet: Fleet) -> None:
    digest = digest_of("one")
    prefix = int(digest[:16], 16)
    views = [view("local"), view("peer", prefix), view("other", prefix, is_draining=True)]
    fleet.engine.update(views, {"peer": fleet.peer, "other": fleet.other})
    assert fleet.engine.holds_elsewhere(digest)
    fleet.engine.update([views[0], views[2]], {"other": fleet.other})
    assert not fleet.engine.holds_elsewhere(digest)


class NotLoadingEngine(ScriptedEngine):
    async def call(self, message: EngineCall[AnswerT], timeout_s: float) -> AnswerT:
        raise TimeoutError


async def test_servers_that_hold_a_predecessor_load_an_adapter(fleet: Fleet) -> None:
    new, old, older = map(digest_of, ("new", "old", "older"))
    hung, draining = NotLoadingEngine(), ScriptedEngine()
    views = [view("local", int(old[:16], 16)), view("peer", int(older[:16], 16)), view("other", int(new[:16], 16) + 1)]
    views += [view("hung", int(old[:16], 16)), view("draining", int(old[:16], 16), is_draining=True)]
    engines = {"peer": fleet.peer, "other": fleet.other, "hung": hung, "draining": draining}
    fleet.engine.update(views, engines)
    await fleet.engine.load_elsewhere(new, [old, older], 1.0)
    assert list(fleet.peer.resident) == [new]
    for engine in (fleet.local, fleet.other, draining):
        assert not engine.resident


async def test_behind_a_picker_servers_that_hold_a_predecessor_load_an_adapter() -> None:
    new, old = map(digest_of, ("new", "old"))
    local, peer, other_base = ScriptedEngine(), ScriptedEngine(), ScriptedEngine()
    engine = RoutedEngine(
        local, "local", ChosenRouter, lambda outcome: None, lambda: None, base_id="own", is_own_only=True
    )
    held = int(old[:16], 16)
    views = [view("local", held, base_id="own"), view("peer", held, base_id="own"), view("far", held, base_id="far")]
    engine.update(views, {"peer": peer, "far": other_base})
    await engine.load_elsewhere(new, [old], 1.0)
    assert list(peer.resident) == [new]
    assert not local.resident
    assert not other_base.resident


def test_requests_that_can_share_pages_have_the_same_prefix_key() -> None:
    def key(prompt: range, isolation_key: bytes) -> bytes | None:
        changed = msgspec.structs.replace(add("one"), prompt=tuple(prompt), isolation_key=isolation_key)
        return routing_request(changed).prefix_key

    assert key(range(100), b"a") == key(range(200), b"a") != None  # noqa: E711
    assert key(range(1, 101), b"a") != key(range(100), b"a") != key(range(100), b"b")
    assert key(range(63), b"a") is None
    assert key(range(100), b"") is None
