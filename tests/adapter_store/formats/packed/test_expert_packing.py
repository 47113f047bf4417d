"""Only the experts that an adapter changes take pages, in either form of its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packed_file import write_packed
from loramux.adapter_store.formats.packed.packing import PackedAdapter, pack
from loramux.adapter_store.validation.validation import validate_files
from loramux.kernels.layout import AFFINE, A, B, part_layout
from tests.adapter_store.adapter_files import AdapterFiles, AdapterMaker
from tests.adapter_store.expert_base import EXPERT_SIZE, expert_target, experts_named, stacked_files
from tests.adapter_store.packed_files import read_packed
from tests.adapter_store.small_base import HIDDEN

PARTS = ("gate_proj", "up_proj", "down_proj")
EIGHT = tuple(range(3, 128, 16))


def packed(files: AdapterFiles, target: PackTarget, directory: Path) -> PackedAdapter:
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    path = directory / "canonical"
    write_canonical(files.tensor_bytes, report.scales, path, report.names)
    found = pack(path, target)
    assert found.num_pages == report.num_pages
    return found


def part(found: PackedAdapter, target: PackTarget, module: str, index: int, layer: int = 1) -> np.ndarray:
    """A module's A `[rank, in_features]`, B transposed `[rank, out_features]` or affine `[2, out_features]`."""
    m = [one.name for one in target.all_modules].index(module)
    rank, offsets = found.layout.rank_and_offsets(layer, m)
    layout = part_layout(target.all_modules[m], index, rank, target.geometry.adapter_elements)
    stream = found.payload.view(target.storage_dtype)[:, layer].reshape(-1)
    rows = stream[offsets[index] : offsets[index] + layout.num_elements].reshape(-1, layout.row.padded_len)
    return rows[:, : layout.row.row_len]


def test_an_adapter_on_8_of_128_experts_takes_the_pages_of_8(tmp_path: Path) -> None:
    target, small = expert_target(128), expert_target(8)
    named = experts_named(*PARTS, experts=EIGHT)
    names = [name.removeprefix("mlp.") for name in named]
    of_eight = packed(AdapterMaker(target)(rank=16, modules=named, target_modules=names), target, tmp_path)
    of_all = packed(
        AdapterMaker(small)(rank=16, modules=experts_named(*PARTS, experts=tuple(range(8)))), small, tmp_path
    )
    assert of_eight.num_pages == of_all.num_pages
    assert np.array_equal(of_eight.payload, of_all.payload)
    # A row of 24 elements is padded to 128, as everywhere.
    num_elements = 8 * 16 * (2 * (HIDDEN + EXPERT_SIZE) + EXPERT_SIZE + HIDDEN)
    padded = 8 * 16 * 6 * 128
    assert num_elements <= padded
    assert of_eight.num_pages == -(-padded // target.geometry.adapter_elements)


def test_stacked_tensors_give_each_expert_its_own(tmp_path: Path) -> None:
    target = expert_target()
    files = stacked_files(rank=3)
    found = packed(files, target, tmp_path)
    above = "base_model.model.model.layers.1.mlp.experts."
    for expert in range(4):
        for module, wrapper in (("gate_up_proj.{}", "base_layer."), ("{}.down_proj", "")):
            a, b = (files.tensors[f"{above}{wrapper}lora_{half}.weight"] for half in "AB")
            name = "mlp.experts." + module.format(expert)
            # PEFT orders the rows of A by expert, and the columns of B by rank.
            assert np.array_equal(part(found, target, name, A), a.reshape(4, 3, -1)[expert])
            assert np.array_equal(part(found, target, name, B), b.reshape(-1, 3, 4)[:, :, expert].T)
    assert set(found.scales[found.layout.ranks > 0].tolist()) == {2.0}
    assert not found.layout.ranks[0].any()


def test_biases_of_experts_are_shifts(tmp_path: Path) -> None:
    target = expert_target()
    files = AdapterMaker(target)(rank=2, modules=experts_named("down_proj"), layers=(1,), lora_bias=True)
    found = packed(files, target, tmp_path)
    for expert in range(4):
        bias = files.tensors[f"base_model.model.model.layers.1.mlp.experts.{expert}.down_proj.lora_B.bias"]
        gain, shift = part(found, target, f"mlp.experts.{expert}.down_proj", AFFINE)
        assert not gain.any()
        assert np.array_equal(shift, 2 * bias)


def test_alternating_outputs_of_gate_and_up_are_packed_one_after_the_other(tmp_path: Path) -> None:
    plain = expert_target()
    assert plain.experts is not None
    gate_up, *_, down = plain.experts.linears
    linears = (replace(gate_up, alternates=True), replace(down, name=None))
    target = replace(plain, experts=replace(plain.experts, linears=linears))
    assert PackTarget.from_document(target.document()) == target
    assert target.pack_key != plain.pack_key
    files = stacked_files(rank=3)
    found = packed(files, target, tmp_path)
    b = files.tensors["base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight"].reshape(-1, 3, 4)
    for expert in range(4):
        halves = np.concatenate((b[::2, :, expert], b[1::2, :, expert]))
        assert np.array_equal(part(found, target, f"mlp.experts.gate_up_proj.{expert}", B), halves.T)


def test_both_forms_of_equal_weights_take_equal_pages(tmp_path: Path) -> None:
    target = expert_target()
    stacked = stacked_files(rank=4, target_parameters=["experts.down_proj"])
    above = "base_model.model.model.layers.1.mlp.experts."
    a, b = (stacked.tensors[f"{above}lora_{half}.weight"] for half in "AB")
    stacked.tensors = {f"{above}lora_A.weight": a, f"{above}lora_B.weight": b}
    single = AdapterMaker(target)(rank=4, modules=experts_named("down_proj"))
    for expert in range(4):
        single.tensors[f"{above}{expert}.down_proj.lora_A.weight"] = np.ascontiguousarray(a.reshape(4, 4, -1)[expert])
        of_expert = np.ascontiguousarray(b.reshape(-1, 4, 4)[:, :, expert])
        single.tensors[f"{above}{expert}.down_proj.lora_B.weight"] = of_expert
    one, other = packed(stacked, target, tmp_path), packed(single, target, tmp_path)
    assert np.array_equal(one.payload, other.payload)
    assert np.array_equal(one.layout.offsets, other.layout.offsets)
    assert np.array_equal(one.scales, other.scales)


def test_a_packed_file_keeps_an_adapter_of_experts(tmp_path: Path) -> None:
    target = expert_target(128)
    files = AdapterMaker(target)(rank=5, modules=experts_named("down_proj", experts=tuple(range(128))))
    found = packed(files, target, tmp_path)
    write_packed(tmp_path / "packed", found, target)
    read = read_packed(tmp_path / "packed", target, found.digest)
    assert np.array_equal(read.payload, found.payload)
    assert np.array_equal(read.layout.ranks, found.layout.ranks)
    assert PackTarget.from_document(target.document()) == target


def test_uploads_are_bounded_by_the_rank_of_experts() -> None:
    target, dense = expert_target(128), expert_target(1)
    outputs = 2 * EXPERT_SIZE + HIDDEN
    of_one = (256 * (2 * HIDDEN + EXPERT_SIZE + outputs) + outputs) * 4
    tensors = target.max_tensors_bytes - target.max_header_bytes
    router = 127 * 4 * (256 + 1)
    assert tensors - (dense.max_tensors_bytes - dense.max_header_bytes) == 127 * of_one + 2 * router
    assert target.max_pages == target.layout(target.equal_ranks(256), has_affines=True).num_pages
