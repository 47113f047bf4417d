"""Converted LoRAs of experts have the products that mlx-lm computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files import tensor_file
from loramux.adapter_store.formats.mlx import expert_stacks
from loramux.adapter_store.formats.mlx.base_facts import BaseFacts
from loramux.adapter_store.formats.mlx.conversion import convert_mlx
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.validation.validation import validate_files
from tests.adapter_store.expert_base import EXPERT_SIZE, HIDDEN, expert_target
from tests.adapter_store.formats.mlx.mlx_files import expert_tensors, random_pair, write_tensors

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
SIZES = {GATE: (HIDDEN, EXPERT_SIZE), UP: (HIDDEN, EXPERT_SIZE), DOWN: (EXPERT_SIZE, HIDDEN)}
EXPERTS, ATTENTION = "model.layers.1.mlp.switch_mlp", "model.layers.0.self_attn.q_proj"
NUM_EXPERTS, RANK, SCALE = 4, 3, 2.5
FILE = "adapters.safetensors"

Tensors = dict[str, npt.NDArray[Any]]


def alternating_target() -> PackTarget:
    """A base like gpt-oss, whose experts can only be stacked and whose gate and up alternate."""
    target = expert_target(NUM_EXPERTS)
    assert target.experts is not None
    gate_up, _, _, down = target.experts.linears
    linears = (replace(gate_up, alternates=True), replace(down, name=None))
    return replace(target, experts=replace(target.experts, linears=linears))


def write(directory: Path, tensors: Tensors, **parameters: Any) -> Path:
    return write_tensors(directory / "mlx", tensors, **{"rank": RANK, "scale": SCALE, **parameters})


def convert(directory: Path, scratch: Path, target: PackTarget) -> None:
    convert_mlx(directory, scratch, lambda: BaseFacts.of(target))


def products(scratch: Path, target: PackTarget) -> dict[str, npt.NDArray[Any]]:
    """Validate a converted adapter and return each module's `scale * B A`, in PEFT's order: the rows of A by expert,
    and the columns of B by rank.
    """
    tensors = load_file(scratch / "adapter_model.safetensors")
    config = (scratch / "adapter_config.json").read_bytes()
    report = validate_files(config, scratch / "adapter_model.safetensors", target)
    assert report.warnings == []
    found = {}
    for name, scale in report.scales.items():
        a, b = (tensors[report.names[f"base_model.model.{name}.lora_{half}.weight"]] for half in "AB")
        if ".experts." not in name:
            found[name] = scale * b @ a
            continue
        rank = len(a) // NUM_EXPERTS
        by_expert = [b[:, e::NUM_EXPERTS] @ a[e * rank : (e + 1) * rank] for e in range(NUM_EXPERTS)]
        found[name] = scale * np.stack(by_expert)
    return found


@pytest.mark.parametrize("names", [(GATE, UP, DOWN), (GATE,), (UP,), (DOWN,), (GATE, DOWN)], ids="-".join)
@pytest.mark.parametrize("is_alternating", [False, True], ids=["one after the other", "alternating"])
@pytest.mark.parametrize("is_earlier", [False, True], ids=["three dimensions", "two dimensions"])
@pytest.mark.parametrize("block", [16, 1 << 20], ids=["blocks", "whole"])
def test_experts_keep_their_products(
    tmp_path: Path,
    names: tuple[str, ...],
    is_alternating: bool,
    is_earlier: bool,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expert_stacks, "BLOCK_ELEMENTS", block)
    monkeypatch.setattr(tensor_file, "BLOCK_ELEMENTS", block)
    target = alternating_target() if is_alternating else expert_target(NUM_EXPERTS)
    tensors = expert_tensors(EXPERTS, {name: SIZES[name] for name in names}, NUM_EXPERTS, RANK)
    of_query = random_pair(np.random.default_rng(5), HIDDEN, HIDDEN, rank=RANK)
    stored = {**tensors, **{f"{ATTENTION}.{leaf}": values for leaf, values in of_query.items()}}
    if is_earlier:
        stored |= {
            name: values.reshape(-1, values.shape[-1]) for name, values in tensors.items() if name.endswith("lora_a")
        }
    convert(write(tmp_path, stored), tmp_path, target)

    def product(name: str) -> npt.NDArray[Any]:
        if name not in names:
            return np.zeros((NUM_EXPERTS, *SIZES[name][::-1]), np.float32)
        return SCALE * tensors[f"{EXPERTS}.{name}.lora_b"] @ tensors[f"{EXPERTS}.{name}.lora_a"]

    wanted = {ATTENTION: SCALE * (of_query["lora_a"] @ of_query["lora_b"]).T}
    if {GATE, UP} & {*names}:
        both = [product(GATE), product(UP)]
        stacked = np.stack(both, 2).reshape(NUM_EXPERTS, -1, HIDDEN) if is_alternating else np.concatenate(both, 1)
        wanted["model.layers.1.mlp.experts.gate_up_proj"] = stacked
    if DOWN in names:
        wanted["model.layers.1.mlp.experts.down_proj"] = product(DOWN)
    found = products(tmp_path, target)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "above",
    [
        "model.layers.1.mlp.switch_mlp",
        "model.layers.1.block_sparse_moe.switch_mlp",
        "model.layers.1.mlp.experts",
        "model.layers.1.experts.switch_glu",
        "language_model.model.layers.1.mlp.switch_mlp",
    ],
)
def test_the_names_of_every_family_are_known(tmp_path: Path, above: str) -> None:
    target = expert_target(NUM_EXPERTS)
    convert(write(tmp_path, expert_tensors(above, SIZES, NUM_EXPERTS, RANK)), tmp_path, target)
    config = (tmp_path / "adapter_config.json").read_bytes()
    report = validate_files(config, tmp_path / "adapter_model.safetensors", target)
    stacks = {f"model.layers.1.mlp.experts.{name}": SCALE for name in ("gate_up_proj", "down_proj")}
    assert report.scales == pytest.approx(stacks)
    assert report.max_rank == 2 * RANK


def test_reads_of_large_stacks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_stacks, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(tensor_file, "_BLOCK_BYTES", 64)
    read = tensor_file.TensorFile.raw_columns
    sizes: list[int] = []

    def counted(self: tensor_file.TensorFile, name: str, columns: range) -> npt.NDArray[Any]:
        values = read(self, name, columns)
        sizes.append(values.size)
        return values

    monkeypatch.setattr(tensor_file.TensorFile, "raw_columns", counted)
    convert(write(tmp_path, expert_tensors(EXPERTS, SIZES, NUM_EXPERTS, RANK)), tmp_path, expert_target(NUM_EXPERTS))
    assert max(sizes) <= 64


def other(**changes: tuple[int, ...]) -> Callable[[Tensors], Tensors]:
    """Replace tensors of the first layer with experts, such as `gate_proj_lora_a`, by others of these shapes."""
    return lambda tensors: {
        **tensors,
        **{f"{EXPERTS}.{key[:-7]}.{key[-6:]}": np.ones(shape, np.float32) for key, shape in changes.items()},
    }


def of_experts(num_experts: int) -> Callable[[Tensors], Tensors]:
    return lambda _: expert_tensors(EXPERTS, SIZES, num_experts, RANK)


def of_rank(rank: int) -> Callable[[Tensors], Tensors]:
    return lambda _: expert_tensors(EXPERTS, SIZES, NUM_EXPERTS, rank)


def in_another_dtype(tensors: Tensors) -> Tensors:
    name = f"{EXPERTS}.{UP}.lora_b"
    return {**tensors, name: tensors[name].astype(np.float16)}


def with_magnitudes(tensors: Tensors) -> Tensors:
    return {**tensors, f"{EXPERTS}.{DOWN}.m": np.ones(HIDDEN, np.float32)}


def named_twice(tensors: Tensors) -> Tensors:
    return {**tensors, **expert_tensors("model.layers.1.mlp.experts", SIZES, NUM_EXPERTS, RANK)}


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (of_experts(3), "base_mismatch", "LoRAs of 3 experts, but the base has 4 experts$"),
        (of_experts(5), "base_mismatch", "LoRAs of 5 experts, but the base has 4 experts$"),
        (of_rank(129), "rank_out_of_range", "both gate_proj and up_proj of experts, the rank may be at most 128$"),
        (of_rank(257), "rank_out_of_range", "between 1 and 256$"),
        (other(gate_proj_lora_b=(EXPERT_SIZE, RANK)), "wrong_dimensions", "must have three dimensions$"),
        (other(gate_proj_lora_a=(HIDDEN,)), "tensor_not_2d", "must have two or three dimensions$"),
        (other(gate_proj_lora_a=(4, 3, 8, 4)), "tensor_not_2d", "must have two or three dimensions$"),
        (other(gate_proj_lora_a=(4, 2, HIDDEN)), "rank_mismatch", "must have 3 ranks for each of 4 experts"),
        (other(down_proj_lora_a=(10, EXPERT_SIZE)), "rank_mismatch", "must have 3 ranks for each of 4 experts"),
        (other(up_proj_lora_b=(4, 20, RANK)), "base_mismatch", "LoRAs of equal shapes and dtypes$"),
        (in_another_dtype, "base_mismatch", "LoRAs of equal shapes and dtypes$"),
        (
            other(down_proj_lora_a=(4, 2, EXPERT_SIZE), down_proj_lora_b=(4, HIDDEN, 2)),
            "rank_mismatch",
            "ranks .* differ",
        ),
        (with_magnitudes, "unsupported_config", "no DoRA of experts"),
        (named_twice, "ambiguous_names", "two modules have names for the same experts$"),
    ],
    ids=[
        "fewer experts",
        "more experts",
        "rank of gate and up",
        "rank",
        "B of two dimensions",
        "A of one dimension",
        "A of four dimensions",
        "A of another rank",
        "A of part of a rank",
        "gate unlike up",
        "dtypes",
        "another rank",
        "magnitudes",
        "two names",
    ],
)
def test_experts_that_cannot_be_served_are_named(
    tmp_path: Path, change: Callable[[Tensors], Tensors], code: str, says: str
) -> None:
    tensors = change(expert_tensors(EXPERTS, SIZES, NUM_EXPERTS, RANK))
    directory = write(tmp_path, tensors)
    with pytest.raises(AdapterRejected, match=says) as refused:
        convert(directory, tmp_path, expert_target(NUM_EXPERTS))
    assert (refused.value.code, refused.value.param in (*tensors, FILE, f"{EXPERTS}.{DOWN}")) == (code, True)


def test_experts_that_adapters_cannot_change_are_named(tmp_path: Path) -> None:
    base = BaseFacts(tied_embeddings=False, num_experts=NUM_EXPERTS)
    tensors = expert_tensors("model.layers.1.feed_forward.experts", {DOWN: SIZES[DOWN]}, NUM_EXPERTS, RANK)
    directory = write(tmp_path, tensors)
    with pytest.raises(AdapterRejected, match=r"train without the keys of its experts$") as refused:
        convert_mlx(directory, tmp_path, lambda: base)
    assert refused.value.param == f"model.layers.1.feed_forward.experts.{DOWN}.lora_b"
