"""The engine's GPU path, on a GPU or with its kernels interpreted on the CPU.

Even with interpreted kernels, only CUDA is missing. Shapes are padded, a step's metadata is one packed copy, captured
steps read each batch from the same buffers, tokens stay on the device, and a step is submitted before the previous
step's tokens are known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.accelerator import DeviceMemory, HostAccelerator
from loramux.engine.device.backend import Backend, DenseLinear
from loramux.engine.execution import graph_executor, step_shape
from loramux.engine.execution.graph_executor import GraphExecutor
from loramux.engine.execution.step_shape import reachable_shapes
from loramux.engine.loop.engine import Engine
from loramux.engine.protocol.messages import Add, DecodeReads, Finished, SamplingParams, StatsRequest, StepOutput
from loramux.engine.sequences.layer_groups import LayerGroups
from loramux.kernels.reference.attention import contiguous_attention
from loramux.kernels.reference.lora import ReferenceLora
from loramux.kernels.segments import LARGE_SEGMENT_ROWS
from loramux.kernels.tables import LoraCall, PoolViews
from tests.conformance.parity import Recorder, Subject, assert_parity, load, make_subject
from tests.conformance.tiny_models import ALL_LINEARS, FAMILIES, SMALL_SHAPE, SMALL_WINDOW, VOCAB_SIZE, AdapterPlan
from tests.engine.device.gpu_backend import capture_early, gpu_backend, plain_backend
from tests.kernels.gpu.interpreted import FOR_GPUS, import_kernels

PLANS = [
    AdapterPlan("r1", 1, ["v_proj"], alpha=2.0),
    AdapterPlan("r3", 3, ALL_LINEARS, alpha=6.0, use_dora=True),
    AdapterPlan("r31", 31, ["k_proj", "o_proj", "up_proj"], layers=[1], lora_bias=True),
    AdapterPlan("by-layer", 4, ALL_LINEARS, rank_pattern={"layers.1.mlp.down_proj": 20}),
]
OUTER_PLANS = [
    AdapterPlan("r3", 3, ["q_proj", "down_proj"], alpha=6.0),
    AdapterPlan("head", 17, ["lm_head"], lora_bias=True),
    AdapterPlan("both", 4, ["embed_tokens", "lm_head", "v_proj"], alpha=8.0, use_dora=True),
]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
GRAPH_FAMILIES = ("llama", "gemma3", "qwen3-moe", "qwen3_5", "gemma4")
"""One family for each kind of layer. How steps are captured does not depend on the family otherwise."""


@pytest.fixture(autouse=True)
def early_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_early(monkeypatch)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    return gpu_backend(monkeypatch)


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=() if family == "llama" else pytest.mark.campaign) for family in FAMILIES],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param), PLANS, SMALL_SHAPE, SMALL_WINDOW)


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=() if family == "llama" else pytest.mark.campaign) for family in GRAPH_FAMILIES],
)
def graph_subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param), PLANS, SMALL_SHAPE, SMALL_WINDOW)


PATHS = ["gpu without kernels", pytest.param("gpu", marks=FOR_GPUS)]
"""The GPU's path for tests that need little of its kernels: with reference kernels, and with the GPU's, which take much
longer if they are interpreted. `tests/kernels/` compares the two.
"""


def gpu_path(name: str, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend of an entry of PATHS. It captures shapes early."""
    if name == "gpu":
        return gpu_backend(monkeypatch)
    capture_early(monkeypatch)
    return plain_backend(HostAccelerator())


def requests(
    subject: Subject, sampling: SamplingParams = GREEDY, num_tokens: int = 4
) -> dict[str, tuple[str | None, Add]]:
    """Prompts shorter and longer than a page and than a step's budget, for the base and adapters of several ranks."""
    return requests_of(subject, [(None, 5), ("r3", 17), ("r31", 1), ("by-layer", 36)], sampling, num_tokens)


def requests_of(
    subject: Subject, wanted: list[tuple[str | None, int]], sampling: SamplingParams = GREEDY, num_tokens: int = 4
) -> dict[str, tuple[str | None, Add]]:
    made: dict[str, tuple[str | None, Add]] = {}
    generator = torch.Generator().manual_seed(3)
    for name, length in wanted:
        prompt = torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()
        add = Add(
            sequence_id=f"{name}-{length}",
            prompt=tuple(prompt),
            max_tokens=num_tokens,
            sampling=sampling,
            digest=None if name is None else subject.digests[name],
        )
        made[add.sequence_id] = (name, add)
    return made


def tokens_of(engine: Engine, adds: Iterable[Add]) -> dict[str, list[int]]:
    for add in adds:
        engine.add(b"", add)
    tokens: dict[str, list[int]] = defaultdict(list)
    while engine.has_work:
        engine.step()
        for outbound in engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        tokens[output.sequence_id].extend(output.token_ids)
                case Finished(reason=reason):
                    assert reason == "length", outbound.message
    return tokens


def test_a_mixed_batch_equals_transformers_and_peft(
    subject: Subject, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = subject.assemble(backend, max_batch_tokens=32)
    load(assembled.engine, subject.digests.values())
    recorder = Recorder(assembled.engine, monkeypatch)
    asked = requests(subject)
    tokens = tokens_of(assembled.engine, [add for _, add in asked.values()])
    for sequence_id, (name, add) in asked.items():
        logits = recorder.by_sequence[sequence_id]
        assert_parity(subject, name, add, logits)
        assert tokens[sequence_id] == [int(row.argmax()) for row in logits]
    executor = recorder.executor
    assert isinstance(executor, GraphExecutor)
    assert executor.num_graphs > 0
    assert any(batch.max_q > 1 and (batch.slots >= 0).any() for batch, _ in recorder.steps)
    assert assembled.engine.stats(StatsRequest(call_id="")).max_adapters_in_step >= 3
    assembled.engine.check_integrity()
    assembled.adapters.close()


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=() if family == "llama" else pytest.mark.campaign) for family in FAMILIES],
)
def outer_subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp(f"outer-{request.param}")
    return make_subject(request.param, directory, OUTER_PLANS, SMALL_SHAPE, SMALL_WINDOW)


def test_adapters_of_the_embedding_and_the_head_have_shapes_of_their_own(
    outer_subject: Subject, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = outer_subject.assemble(backend)
    recorder = Recorder(assembled.engine, monkeypatch)
    executor = recorder.executor
    assert isinstance(executor, GraphExecutor)
    asked = requests_of(outer_subject, [(None, 1), ("head", 1), ("both", 9)], num_tokens=3)
    tokens = tokens_of(assembled.engine, [add for _, add in asked.values()])
    for sequence_id, (name, add) in asked.items():
        logits = recorder.by_sequence[sequence_id]
        assert_parity(outer_subject, name, add, logits)
        assert tokens[sequence_id] == [int(row.argmax()) for row in logits]
    assert any(shape.has_outer for shape in executor._has_run)

    # A batch without these adapters must not call their kernels, although the adapters are resident. Make any call
    # fail.
    monkeypatch.setattr(executor._kernels, "outer", None)
    tokens_of(assembled.engine, [add for _, add in requests_of(outer_subject, [("r3", 1)], num_tokens=1).values()])
    assembled.adapters.close()


def note_groups(executor: GraphExecutor, monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    """Record the modules of each group passed to `lora_add`."""
    noted: set[tuple[int, ...]] = set()
    add = executor._kernels.lora_add

    def note(x: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        noted.add(call.group.modules)
        add(x, call, y)

    monkeypatch.setattr(executor._kernels, "lora_add", note)
    return noted


def test_adapters_of_few_modules_launch_nothing_for_the_others(
    subject: Subject, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = subject.assemble(backend)
    recorder = Recorder(assembled.engine, monkeypatch)
    executor = recorder.executor
    assert isinstance(executor, GraphExecutor)
    launched = note_groups(executor, monkeypatch)
    config = ModelConfig.load(subject.directory)
    layers = [config.layer_groups(layer) for layer in range(config.num_layers)]
    qkv, o, gate_up = ({groups[kind] for groups in layers} - {()} for kind in range(3))
    if not layers[1][2]:
        # The adapter r31 has only modules of layer 1.
        gate_up = set()
    for wanted, num_tokens, expected in [([None, "r1"], 3, qkv), (["r31"], 1, qkv | o | gate_up)]:
        launched.clear()
        asked = requests_of(subject, [(name, 1) for name in wanted], num_tokens=num_tokens)  # type: ignore[attr-defined]
        recorder.by_sequence.clear()
        tokens_of(assembled.engine, [add for _, add in asked.values()])
        for sequence_id, (name, add) in asked.items():
            assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
        assert launched == expected
    # Groups without modules are included.
    assert any(LayerGroups.QKV in shape.groups and LayerGroups.O not in shape.groups for shape in executor._graphs)
    assembled.adapters.close()


@pytest.mark.campaign
def test_a_long_prompt_is_taken_in_large_segments(
    subject: Subject, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = subject.assemble(backend, max_batch_tokens=256, max_sequences=8)
    recorder = Recorder(assembled.engine, monkeypatch)
    executor = recorder.executor
    assert isinstance(executor, GraphExecutor)
    asked = requests_of(subject, [("r3", 150), ("by-layer", 7)], num_tokens=1)
    tokens_of(assembled.engine, [add for _, add in asked.values()])
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    assert LARGE_SEGMENT_ROWS in {shape.segment_rows for shape in executor._has_run}
    assembled.adapters.close()


@pytest.mark.parametrize(
    "subject",
    [pytest.param(one, marks=() if one == "llama" else pytest.mark.campaign) for one in FAMILIES],
    indirect=True,
)
def test_large_steps_expand_adapters_without_affines_first(
    subject: Subject, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base's product adds to the adapters' outputs, except in steps with an adapter that rescales a sum."""
    monkeypatch.setattr(step_shape, "MIN_EXPANDED_FIRST_ROWS", 16)
    assembled = subject.assemble(backend, max_batch_tokens=16)
    recorder = Recorder(assembled.engine, monkeypatch)
    executor = recorder.executor
    assert isinstance(executor, GraphExecutor)
    noted: set[int] = set()
    delta = executor._kernels.lora_delta

    def note(x: torch.Tensor, call: LoraCall, slots: torch.Tensor, y: torch.Tensor) -> None:
        noted.update(slots.tolist())
        delta(x, call, slots, y.fill_(torch.nan))

    monkeypatch.setattr(executor._kernels, "lora_delta", note)
    for wanted, expands_first in (([(None, 5), ("by-layer", 7), ("r1", 3)], True), ([("r3", 7), (None, 3)], False)):
        noted.clear()
        asked = requests_of(subject, wanted, num_tokens=1)
        recorder.by_sequence.clear()
        tokens_of(assembled.engine, [add for _, add in asked.values()])
        for sequence_id, (name, add) in asked.items():
            assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
        # A layer with a bias does not add.
        blocks = [block for layer in executor._decoder._layers for block in (layer.attention.qkv, layer.attention.o)]
        adds = any(block.adding is not None for block in blocks)
        assert len(noted) == (3 if expands_first and adds else 0), "the base and two adapters"
    assembled.adapters.close()


@pytest.mark.parametrize(
    "subject",
    [pytest.param(one, marks=() if one == "llama" else pytest.mark.campaign) for one in FAMILIES],
    indirect=True,
)
def test_uncaptured_steps_read_contiguous_keys(
    subject: Subject, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of prompts without prefixes, then a chunk of a prompt beside a decode, then a decode in a graph."""
    monkeypatch.setattr(step_shape, "MAX_GRAPH_TOKENS", 15)
    kernels, contiguous = import_kernels("kernels", "contiguous_attention")
    monkeypatch.setattr(contiguous, "MIN_PAIRS_PER_KEY", 0)
    noted: set[tuple[bool, bool]] = set()

    def attention(*arguments: Any) -> None:
        keys, out = arguments[3], arguments[5]
        noted.add((keys.pages is None, keys.has_decodes))
        out[: keys.num_rows] = torch.nan
        contiguous_attention(*arguments)

    def make_kernels(pool: PoolViews, shapes: object) -> Any:
        return kernels.GpuKernels(pool, contiguous_attention=attention)

    assembled = subject.assemble(replace(backend, make_kernels=make_kernels), max_batch_tokens=32)
    recorder = Recorder(assembled.engine, monkeypatch)
    asked = requests_of(subject, [(None, 5), ("r3", 40)], num_tokens=2)
    tokens = tokens_of(assembled.engine, [add for _, add in asked.values()])
    for sequence_id, (name, add) in asked.items():
        logits = recorder.by_sequence[sequence_id]
        assert_parity(subject, name, add, logits)
        assert tokens[sequence_id] == [int(row.argmax()) for row in logits]
    config = ModelConfig.load(subject.directory)
    attention_config = config.attention
    # With a soft cap or sinks, all layers read pages.
    is_read = attention_config.soft_cap is None and not attention_config.has_sinks
    assert bool(noted) == is_read
    if is_read:
        assert {is_fresh for is_fresh, _ in noted} == {True, False}
        assert any(has_decodes for _, has_decodes in noted)
    assembled.engine.check_integrity()
    assembled.adapters.close()


@pytest.mark.parametrize(
    "subject",
    [pytest.param(one, marks=() if one == "llama" else pytest.mark.campaign) for one in FAMILIES],
    indirect=True,
)
def test_linear_layers_and_adapters_can_be_one_product(
    subject: Subject, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and decodes with adapters of several ranks, one of which rescales sums, and a request of the base."""
    assembled = subject.assemble(backend, max_batch_tokens=16)
    recorder = Recorder(assembled.engine, monkeypatch)
    executor = recorder.executor
    assert isinstance(executor, GraphExecutor)
    kernels: Any = executor._kernels
    monkeypatch.setattr(kernels, "max_fused_rows", 128)
    noted: set[int] = set()
    multiply = kernels.lora_linear

    def note(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        noted.add(x.shape[0])
        return multiply(x, *rest)

    monkeypatch.setattr(kernels, "lora_linear", note)
    asked = requests_of(subject, [(None, 5), ("r3", 3), ("by-layer", 1), ("r31", 2)], num_tokens=2)
    tokens_of(assembled.engine, [add for _, add in asked.values()])
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    assert noted == {4, 16}, "a decode and a step with prompts"
    assembled.adapters.close()


def test_shapes_of_few_modules_drop_no_graphs(graph_subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = plain_backend(HostAccelerator(), compiles=True)
    assembled = graph_subject.assemble(backend, max_batch_tokens=16, max_sequences=1)
    recorder = Recorder(assembled.engine, monkeypatch)
    executor = recorder.executor
    assert isinstance(executor, GraphExecutor)
    warmed = set(executor._graphs)
    launched = note_groups(executor, monkeypatch)
    for room in (0, 1):
        executor._max_graphs = len(warmed) + room
        launched.clear()
        asked = requests_of(graph_subject, [("r1", 1)], num_tokens=4)
        recorder.by_sequence.clear()
        tokens_of(assembled.engine, [add for _, add in asked.values()])
        for sequence_id, (name, add) in asked.items():
            assert_parity(graph_subject, name, add, recorder.by_sequence[sequence_id])
        assert set(executor._graphs) >= warmed
        assert len(executor._graphs) == len(warmed) + room
    # There was room for one more graph, so the new shape was captured at its first decode.
    (narrow,) = set(executor._graphs) - warmed
    # Groups without modules are included.
    assert LayerGroups.QKV in narrow.groups
    assert LayerGroups.O not in narrow.groups
    assert narrow.is_decode
    config = ModelConfig.load(graph_subject.directory)
    assert launched == {config.layer_groups(layer)[0] for layer in range(config.num_layers)}
    assembled.adapters.close()


@pytest.mark.parametrize("compiles", [True, False], ids=["warmed up", "cold"])
def test_a_rare_shape_is_not_captured(graph_subject: Subject, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture stops every request, so it must first be likely that the graph is used again."""
    monkeypatch.setattr(graph_executor, "STEPS_BEFORE_CAPTURE", 3)
    monkeypatch.setattr(graph_executor, "STEPS_BEFORE_OWN_GRAPH", 6)
    backend = plain_backend(HostAccelerator(), compiles)
    assembled = graph_subject.assemble(backend, max_batch_tokens=16, max_sequences=1)
    recorder = Recorder(assembled.engine, monkeypatch)
    executor = recorder.executor
    assert isinstance(executor, GraphExecutor)
    warmed = set(executor._graphs)
    launched = note_groups(executor, monkeypatch)
    config = ModelConfig.load(graph_subject.directory)
    narrow = {config.layer_groups(layer)[0] for layer in range(config.num_layers)}
    # Decodes until the capture, whether they replay another graph, and the decodes of one answer.
    num_rare = 6 if compiles else 2
    num_decodes = 4
    for number in range(1, 4):
        asked = requests_of(graph_subject, [("r1", 1)], num_tokens=num_decodes)
        recorder.by_sequence.clear()
        launched.clear()
        tokens_of(assembled.engine, [add for _, add in asked.values()])
        for sequence_id, (name, add) in asked.items():
            assert_parity(graph_subject, name, add, recorder.by_sequence[sequence_id])
        num_captured = len(set(executor._graphs) - warmed)
        assert num_captured == (number * num_decodes > num_rare), f"after {number * num_decodes} decodes"
        if compiles and number == 1:
            assert launched != narrow, "the graph of all groups was not replayed"
    assembled.adapters.close()


def test_a_shape_whose_capture_fails_runs_uncaptured(
    graph_subject: Subject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class RefusingAccelerator(HostAccelerator):
        num_captures = 0

        def capture(self, step: Callable[[], None]) -> Callable[[], None]:
            self.num_captures += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    accelerator = RefusingAccelerator()
    assembled = graph_subject.assemble(plain_backend(accelerator), max_batch_tokens=16, max_sequences=4)
    recorder = Recorder(assembled.engine, monkeypatch)
    executor = recorder.executor
    assert isinstance(executor, GraphExecutor)
    asked = requests_of(graph_subject, [(None, 1), ("r3", 3)], num_tokens=6)
    tokens_of(assembled.engine, [add for _, add in asked.values()])
    for sequence_id, (name, add) in asked.items():
        assert_parity(graph_subject, name, add, recorder.by_sequence[sequence_id])
    assert executor.num_graphs == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "runs without a graph" in line]
    assert len(told) == accelerator.num_captures == len(executor._uncapturable) > 0, "each shape is tried once"
    assembled.engine.check_integrity()
    assembled.adapters.close()


def test_a_failed_capture_of_one_of_several_workers_is_raised(
    graph_subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other workers would capture the shape, and exchange nothing with this one meanwhile."""

    def refuse(accelerator: HostAccelerator, step: Callable[[], None]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    assembled = graph_subject.assemble(plain_backend(HostAccelerator()), max_batch_tokens=16, max_sequences=4)
    executor = assembled.engine._executor
    assert isinstance(executor, GraphExecutor)
    monkeypatch.setattr(HostAccelerator, "capture", refuse)
    monkeypatch.setattr(executor, "_must_capture", True)
    with pytest.raises(RuntimeError, match="operation not permitted when stream"):
        tokens_of(assembled.engine, [add for _, add in requests_of(graph_subject, [(None, 1)], num_tokens=6).values()])
    assembled.adapters.close()


def test_the_memory_that_captures_take_is_counted(graph_subject: Subject) -> None:
    class SmallAccelerator(HostAccelerator):
        """A device with its own memory, where each captured step takes 3 MiB."""

        free = 1 << 30

        def memory(self) -> DeviceMemory:
            return DeviceMemory(self.free, 1 << 30)

        def capture(self, step: Callable[[], None]) -> Callable[[], None]:
            self.free -= 3 << 20
            return step

    assembled = graph_subject.assemble(
        plain_backend(SmallAccelerator(), compiles=True), max_batch_tokens=16, max_sequences=4
    )
    num_decodes = sum(shape.is_decode for shape in reachable_shapes(16, 4))
    graphs = assembled.engine.stats(StatsRequest(call_id="")).graphs
    assert (graphs.num_graphs, graphs.num_bytes) == (num_decodes, num_decodes * (3 << 20))
    assembled.adapters.close()


def test_the_graph_that_was_replayed_longest_ago_is_dropped(
    graph_subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = graph_subject.assemble(plain_backend(HostAccelerator()), max_batch_tokens=16, max_sequences=4)
    recorder = Recorder(assembled.engine, monkeypatch)
    executor = recorder.executor
    assert isinstance(executor, GraphExecutor)
    executor._max_graphs = 2
    # Sequences end one after another, so that decodes have several sizes. The adapter adds more shapes.
    for name in ("r3", None, "r3"):
        asked = requests_of(graph_subject, [(name, 1), (None, 2), (None, 3), (None, 4)])
        adds = [
            (owner, structs.replace(add, max_tokens=3 + 2 * place)) for place, (owner, add) in enumerate(asked.values())
        ]
        recorder.by_sequence.clear()
        tokens_of(assembled.engine, [add for _, add in adds])
        for adapter, add in adds:
            assert_parity(graph_subject, adapter, add, recorder.by_sequence[add.sequence_id])
        assert executor.num_graphs == 2
    assert len(executor._has_run) > 2
    assembled.adapters.close()


def test_a_dropped_graph_is_captured_again_only_once_its_shape_has_recurred(
    graph_subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CountingAccelerator(HostAccelerator):
        num_captures = 0

        def capture(self, step: Callable[[], None]) -> Callable[[], None]:
            self.num_captures += 1
            return step

    monkeypatch.setattr(graph_executor, "STEPS_BEFORE_CAPTURE", 3)
    accelerator = CountingAccelerator()
    assembled = graph_subject.assemble(plain_backend(accelerator), max_batch_tokens=16, max_sequences=1)
    executor = Recorder(assembled.engine, monkeypatch).executor
    assert isinstance(executor, GraphExecutor)
    executor._max_graphs = 1
    # Each request takes a step with a prompt and a decode, which drop each other's graphs.
    for _ in range(9):
        tokens_of(assembled.engine, [add for _, add in requests_of(graph_subject, [(None, 2)], num_tokens=2).values()])
    assert accelerator.num_captures == 4, (
        "each shape in the third step, and then in the third after its graph was dropped"
    )
    assembled.adapters.close()


def test_decode_steps_count_what_they_must_read(graph_subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of known bandwidth. On the CPU, nothing is counted."""

    class MeasuredAccelerator(HostAccelerator):
        """A device on which the weights take 1 MB more than embeddings and experts."""

        num_bytes = 5000

        def allocated_bytes(self) -> int:
            return self.num_bytes

        def bandwidth(self, memory: torch.Tensor) -> float:
            assert memory.dtype is torch.uint8
            assert memory.dim() == 1
            assert memory.numel() > 0
            return 1e12

    counted: dict[str, DecodeReads] = {}
    for name, accelerator in (("measured", MeasuredAccelerator()), ("host", HostAccelerator())):
        backend = plain_backend(accelerator)

        def make_linear(
            weight: torch.Tensor, bias: torch.Tensor | None, accelerator: HostAccelerator = accelerator
        ) -> DenseLinear:
            if isinstance(accelerator, MeasuredAccelerator):
                accelerator.num_bytes = 10_000_000
            return DenseLinear(weight, bias)

        assembled = graph_subject.assemble(replace(backend, make_linear=make_linear), max_batch_tokens=16)
        asked = requests_of(graph_subject, [("r1", 9), (None, 3)], num_tokens=4)
        tokens_of(assembled.engine, [add for _, add in asked.values()])
        counted[name] = assembled.engine.stats(StatsRequest(call_id="")).decode_reads
        decoder = assembled.engine._executor._decoder  # type: ignore[attr-defined]
        assembled.adapters.close()
    assert counted["host"] == DecodeReads()
    reads = counted["measured"]
    fixed = 10_000_000 - 5000 - decoder.embedding_bytes - decoder.expert_bytes
    config = decoder.config
    assert (decoder.expert_bytes > 0) == (config.mixture is not None)
    assert (decoder.embedding_bytes == 0) == (config.tied_embeddings and not config.layer_input_size)
    # Three decode steps of two sequences read all weights, and at most all experts and a few pages.
    assert 3 * fixed < reads.num_bytes < 3 * (fixed + decoder.expert_bytes) + 3_000_000
    assert reads.utilization is not None
    assert reads.utilization > 0


def test_kernels_of_outer_modules_are_warmed_up_with_each_shape(
    outer_subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step that needs these kernels finds them loaded and is captured immediately."""
    backend = plain_backend(HostAccelerator(), compiles=True)
    launched: set[tuple[str, int, int]] = set()
    for name in ("lora_gather", "lora_shrink", "lora_expand"):
        monkeypatch.setattr(ReferenceLora, name, noting(name, getattr(ReferenceLora, name), launched))
    assembled = outer_subject.assemble(backend, max_batch_tokens=16, max_sequences=4)
    executor = assembled.engine._executor
    assert isinstance(executor, GraphExecutor)
    assert set(executor._graphs) == {shape for shape in reachable_shapes(16, 4) if shape.is_decode}
    warmed = set(launched)
    asked = requests_of(outer_subject, [(None, 1), ("head", 1), ("both", 9), ("r3", 3)])
    recorder = Recorder(assembled.engine, monkeypatch)
    tokens_of(assembled.engine, [add for _, add in asked.values()])
    for sequence_id, (name, add) in asked.items():
        assert_parity(outer_subject, name, add, recorder.by_sequence[sequence_id])
    assert {name for name, _, _ in launched} == {"lora_gather", "lora_shrink", "lora_expand"}
    assert launched == warmed, "a step launched a kernel that was not warmed up"
    assert any(shape.has_outer for shape in executor._graphs)
    assembled.adapters.close()


def noting(name: str, kernel: Callable[..., None], launched: set[tuple[str, int, int]]) -> Callable[..., None]:
    """Record the values that kernels are compiled for: the number of segments and the maximum rank."""

    def note(self: ReferenceLora, *arguments: Any) -> None:
        (call,) = (one for one in arguments if isinstance(one, LoraCall))
        launched.add((name, call.segments.num_segments, call.segments.max_rank))
        kernel(self, *arguments)

    return note
