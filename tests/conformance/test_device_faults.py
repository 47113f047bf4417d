from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from loramux.engine.device.device_faults import device_fault
from loramux.engine.loop.assembly import AssembledEngine
from loramux.engine.loop.engine import Engine
from loramux.engine.protocol.errors import ConfigNotUsable, DeviceNotUsable, EngineError, PoolTooSmall
from loramux.engine.protocol.messages import Add, Finished, SamplingParams
from tests.conformance.parity import Subject, make_subject
from tests.conformance.tiny_models import ALL_LINEARS, SMALL_SHAPE, SMALL_WINDOW, AdapterPlan
from tests.engine.device.fake_card import GIB, FakeCard, cuda_error, fake_backend, out_of_memory
from tests.engine.device.gpu_backend import capture_early

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
LOST = cuda_error("the device fell off the bus")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    plans = [AdapterPlan("r3", 3, ALL_LINEARS, alpha=6.0)]
    return make_subject("llama", tmp_path_factory.mktemp("llama"), plans, SMALL_SHAPE, SMALL_WINDOW)


@pytest.fixture(autouse=True)
def early_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_early(monkeypatch)


@pytest.fixture
def card() -> FakeCard:
    return FakeCard()


def assemble(subject: Subject, card: FakeCard, make_linear: Any = None, **settings: Any) -> AssembledEngine:
    backend = fake_backend(card) if make_linear is None else fake_backend(card, make_linear)
    return subject.assemble(backend, **{"max_batch_tokens": 16, "max_sequences": 4, **settings})


def refusal(kind: type[EngineError], subject: Subject, card: FakeCard, **arguments: Any) -> str:
    with pytest.raises(kind) as refused:
        assemble(subject, card, **arguments)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_a_card_that_does_not_hold_the_model_is_refused(subject: Subject) -> None:
    def no_room(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        raise out_of_memory()

    assert refusal(DeviceNotUsable, subject, FakeCard(3 * GIB, 80 * GIB), make_linear=no_room) == (
        "the model does not fit on the GPU, which had 3.0 GiB of 80.0 GiB free: "
        "stop other programs on the GPU, or use a larger GPU"
    )


def test_a_card_with_no_room_for_a_pool_beside_the_model_is_refused(subject: Subject) -> None:
    assert refusal(PoolTooSmall, subject, FakeCard(2 * GIB, 80 * GIB), pool_bytes=None) == (
        "the model leaves 2.0 GiB of the GPU's 80.0 GiB free, and 6.4 GiB are reserved for graphs: use a larger GPU or "
        "a smaller model, stop other programs on the GPU, or set pool_bytes to less than the free memory"
    )


def test_a_pool_that_does_not_fit_the_card_is_refused(
    subject: Subject, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def bounded(*sizes: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") == torch.uint8 and len(sizes) == 3:
            raise out_of_memory()
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", bounded)
    assert refusal(PoolTooSmall, subject, card, pool_bytes=100 * GIB) == (
        "a page pool of 100.0 GiB does not fit next to the model: lower pool_bytes, or leave it out"
    )


def test_a_card_with_no_memory_for_a_step_is_refused(subject: Subject, card: FakeCard) -> None:
    card.broken["launch"] = out_of_memory()
    assert refusal(ConfigNotUsable, subject, card) == (
        "the model and the page pool leave no GPU memory for a step of 16 tokens: "
        "set a lower pool_bytes or max_batch_tokens"
    )


@pytest.mark.parametrize("call", ["launch", "fence", "download"])
def test_a_card_that_fails_at_the_start_is_to_blame(subject: Subject, card: FakeCard, call: str) -> None:
    card.broken[call] = cuda_error("no kernel image is available for execution on the device")
    with pytest.raises(torch.AcceleratorError) as failed:
        assemble(subject, card)
    assert device_fault(failed.value) == "CUDA error: no kernel image is available for execution on the device"


def add(name: str, num_tokens: int = 6, digest: str | None = None) -> Add:
    return Add(sequence_id=name, prompt=(5, 6, 7), max_tokens=num_tokens, sampling=GREEDY, digest=digest)


def finished(engine: Engine) -> dict[str, Finished]:
    while engine.has_work:
        engine.step()
    messages = [one.message for one in engine.take_outbox()]
    ends = [message for message in messages if isinstance(message, Finished)]
    assert max(Counter(end.sequence_id for end in ends).values()) == 1
    return {end.sequence_id: end for end in ends}


def lose(card: FakeCard) -> None:
    card.lost = LOST


def break_call(name: str, error: Exception) -> Callable[[FakeCard], None]:
    return lambda card: card.broken.update({name: error})


FAULTS = {
    "launch": break_call("launch", cuda_error("unspecified launch failure")),
    "metadata copy": break_call("fence", cuda_error("an illegal memory access was encountered")),
    "memory": break_call("launch", out_of_memory()),
    "tokens' copy": break_call("download", cuda_error("unspecified launch failure")),
    "lost": lose,
}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
@pytest.mark.parametrize("strike", FAULTS.values(), ids=FAULTS.keys())
def test_no_step_hides_that_its_device_failed(
    subject: Subject, card: FakeCard, strike: Callable[[FakeCard], None], num_steps: int
) -> None:
    """The fault occurs in a step's first run, its capture or a replay. No live sequence may wait forever."""
    assembled = assemble(subject, card)
    engine = assembled.engine
    for name in ("a", "b"):
        engine.add(b"", add(name))
    for _ in range(num_steps):
        engine.step()
    strike(card)
    with pytest.raises(RuntimeError) as failed:
        finished(engine)
    assert device_fault(failed.value) is not None
    assembled.adapters.close()


def test_a_lost_card_is_found_by_a_request_that_waits_for_its_adapter(subject: Subject, card: FakeCard) -> None:
    """Without steps to fail, the engine would look healthy while its adapters keep failing."""
    assembled = assemble(subject, card)
    lose(card)
    assembled.engine.add(b"", add("a", digest=subject.digests["r3"]))
    with pytest.raises(torch.AcceleratorError, match="fell off the bus"):
        finished(assembled.engine)
    assembled.adapters.close()


def test_an_adapter_whose_copy_fails_fails_its_own_requests_once(
    subject: Subject, card: FakeCard, capsys: pytest.CaptureFixture[str]
) -> None:
    assembled = assemble(subject, card)
    engine, digest = assembled.engine, subject.digests["r3"]
    card.broken["upload"] = cuda_error("invalid argument")
    capsys.readouterr()
    for name, wanted in (("base", None), ("first", digest), ("second", digest)):
        engine.add(b"", add(name, digest=wanted))
    ends = finished(engine)
    assert ends["base"].reason == "length"
    assert [ends[name].code for name in ("first", "second")] == ["adapter_unavailable"] * 2
    assert capsys.readouterr().err.splitlines() == [
        f"copying adapter {digest} into the page pool failed: CUDA error: invalid argument"
    ]
    engine.check_integrity()

    card.broken.clear()
    engine.add(b"", add("again", digest=digest))
    assert finished(engine)["again"].reason == "length"
    engine.check_integrity()
    assembled.adapters.close()


def test_a_capture_that_finds_no_memory_is_one_line_and_the_step_runs(
    subject: Subject, card: FakeCard, capsys: pytest.CaptureFixture[str]
) -> None:
    assembled = assemble(subject, card)
    card.broken["capture"] = cuda_error("out of memory")
    capsys.readouterr()
    assembled.engine.add(b"", add("a"))
    assert finished(assembled.engine)["a"].reason == "length"
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.endswith("runs without a graph; capturing it failed: CUDA error: out of memory") for line in lines)
    assembled.adapters.close()
