"""An adapter of a release that divides its linear layers differently changes the base by the same products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.float_formats import to_float32
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter, pack
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.validation.validation import validate_files
from loramux.kernels.layout import AFFINE, A, B, LinearShape, part_layout
from tests.adapter_store.adapter_files import AdapterFiles, AdapterMaker
from tests.adapter_store.small_base import FUSED_MODULES, MODULES, make_target

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
PARTS = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    "linear_attn.in_proj_qkv": ("linear_attn.in_proj_q", "linear_attn.in_proj_k", "linear_attn.in_proj_v"),
}
DELTA_NET = (
    LinearShape("linear_attn.in_proj_qkv", 32, 40, layers=(1,)),
    LinearShape("linear_attn.in_proj_z", 32, 24, layers=(1,)),
    LinearShape("linear_attn.out_proj", 24, 32, layers=(1,)),
)
DIVIDED_NET = (
    LinearShape("linear_attn.in_proj_q", 32, 8, layers=(1,)),
    LinearShape("linear_attn.in_proj_k", 32, 8, layers=(1,)),
    LinearShape("linear_attn.in_proj_v", 32, 24, layers=(1,)),
    *DELTA_NET[1:],
)
DIVIDED, FUSED = (*MODULES, *DIVIDED_NET), (*FUSED_MODULES, *DELTA_NET)


def stream_part(packed: PackedAdapter, target: PackTarget, layer: int, module: int, part: int) -> np.ndarray:
    """One part of a module, float32 `[num_rows, row_len]`."""
    rank, offsets = packed.layout.rank_and_offsets(layer, module)
    layout = part_layout(target.modules[module], part, rank, target.geometry.adapter_elements)
    stream = packed.payload.view(target.storage_dtype)[:, layer].reshape(-1)
    rows = stream[offsets[part] : offsets[part] + layout.num_elements].reshape(layout.num_rows, -1)
    rows = rows[:, : layout.row.row_len]
    return rows if target.dtype == "float32" else to_float32(rows, "BF16")


def changes(packed: PackedAdapter, target: PackTarget, part: int = B) -> dict[tuple[int, str], np.ndarray]:
    """`scale * B A` of each module, `[out, in]`, or its affine, `[out, 2]`; fused modules are divided."""
    found: dict[tuple[int, str], np.ndarray] = {}
    widths = {shape.name: shape.out_features for shape in DIVIDED}
    for layer in range(target.geometry.num_layers):
        for index, shape in enumerate(target.modules):
            if not packed.layout.ranks[layer, index]:
                continue
            rows = stream_part(packed, target, layer, index, part)
            change = rows.T
            if part == B:
                change = packed.scales[layer, index] * (rows.T @ stream_part(packed, target, layer, index, A))
            begin = 0
            for name in PARTS.get(shape.name, (shape.name,)):
                found[layer, name] = change[begin : begin + widths.get(name, len(change))]
                begin += len(found[layer, name])
            assert begin == shape.out_features
    return found


def packed_for(files: AdapterFiles, target: PackTarget, path: Path, base: BaseWeights | None = None) -> PackedAdapter:
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    write_canonical(files.tensor_bytes, report.scales, path, report.names)
    packed = pack(path, target, base)
    assert report.num_pages == packed.num_pages
    assert report.max_rank == packed.layout.ranks.max()
    return packed


def assert_close(one: np.ndarray | None, other: np.ndarray | None, tolerance: float) -> None:
    """Compare two changes, of which an absent one is zero."""
    one, other = (np.float32(0) if change is None else change for change in (one, other))
    assert np.abs(one - other).max() <= tolerance * max(1, np.abs(one).max())


def assert_equal_changes(
    files: AdapterFiles, first: PackTarget, second: PackTarget, path: Path, part: int = B, tolerance: float = 1e-6
) -> None:
    """Pack an adapter for two bases with the same weights, divided differently, and compare."""
    packed = packed_for(files, first, path / "first"), packed_for(files, second, path / "second")
    assert packed[0].digest == packed[1].digest
    ours, theirs = changes(packed[0], first, part), changes(packed[1], second, part)
    # A part without tensors is zero in a fused module, and absent otherwise.
    for key in ours.keys() | theirs.keys():
        assert_close(ours.get(key), theirs.get(key), tolerance)
    assert any(np.abs(change).max() > 0.01 for change in ours.values())


@pytest.fixture(params=["float32", "bfloat16"])
def targets(request: pytest.FixtureRequest) -> tuple[PackTarget, PackTarget]:
    """The base with separate layers, and the base with fused layers."""
    return make_target(request.param, DIVIDED), make_target(request.param, FUSED)


ALL_PARTS = tuple(part for parts in PARTS.values() for part in parts)


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param({"modules": ALL_PARTS}, id="all parts"),
        pytest.param(
            {"modules": (*ALL_PARTS, "self_attn.o_proj", "mlp.down_proj"), "use_rslora": True}, id="and others"
        ),
        pytest.param({"modules": ("self_attn.q_proj", "self_attn.v_proj")}, id="two of three"),
        pytest.param(
            {"modules": ("mlp.up_proj",), "layers": (1,), "layers_to_transform": [1]}, id="one part of a layer"
        ),
        pytest.param({"modules": ALL_PARTS, "ranks": lambda layer, name: 1 + len(name) % 5 + layer}, id="ranks"),
        pytest.param({"modules": ALL_PARTS, "target_modules": r".*(proj|in_proj_[qkv])"}, id="expression"),
    ],
)
def test_parts_of_a_fused_layer_form_blocks(
    targets: tuple[PackTarget, PackTarget], tmp_path: Path, adapter: dict[str, Any]
) -> None:
    divided, fused = targets
    # Different ranks have different scales, and rescaled weights are rounded again.
    is_rescaled = "ranks" in adapter and divided.dtype == "bfloat16"
    files = AdapterMaker(divided)(**adapter)
    assert_equal_changes(files, divided, fused, tmp_path, tolerance=1e-3 if is_rescaled else 1e-6)


def test_parts_with_different_scales_are_rescaled(tmp_path: Path) -> None:
    divided, fused = make_target("float32", DIVIDED), make_target("float32", FUSED)
    alphas = {"q_proj": 3, "k_proj": 16, r"layers\.1\..*v_proj": 1, "up_proj": 7}
    files = AdapterMaker(divided)(modules=ALL_PARTS, alpha_pattern=alphas)
    assert_equal_changes(files, divided, fused, tmp_path)


@pytest.mark.parametrize("modules", [(QKV, GATE_UP, "linear_attn.in_proj_qkv"), (GATE_UP, "self_attn.o_proj")])
def test_a_fused_layer_of_a_file_is_divided(
    targets: tuple[PackTarget, PackTarget], tmp_path: Path, modules: tuple[str, ...]
) -> None:
    divided, fused = targets
    assert_equal_changes(AdapterMaker(fused)(modules=modules), fused, divided, tmp_path)


@pytest.mark.parametrize("source", ["divided", "fused"])
def test_biases_follow_their_outputs(tmp_path: Path, source: str) -> None:
    divided, fused = make_target("float32", DIVIDED), make_target("float32", FUSED)
    first, second = (divided, fused) if source == "divided" else (fused, divided)
    modules = ("self_attn.q_proj", "self_attn.v_proj") if source == "divided" else (QKV, GATE_UP)
    files = AdapterMaker(first)(modules=modules, lora_bias=True)
    assert_equal_changes(files, first, second, tmp_path)
    assert_equal_changes(files, first, second, tmp_path, AFFINE)


def base_weights(directory: Path, modules: tuple[LinearShape, ...], is_fused: bool) -> BaseWeights:
    """Write the same weights and biases, divided or fused."""
    generator = np.random.default_rng(3)
    tensors = {}
    for layer in range(2):
        for shape in DIVIDED:
            if shape.is_in(layer):
                name = f"model.layers.{layer}.{shape.name}"
                tensors[f"{name}.weight"] = generator.standard_normal(
                    (shape.out_features, shape.in_features), np.float32
                )
                tensors[f"{name}.bias"] = generator.standard_normal(shape.out_features, np.float32)
    if is_fused:
        for layer in range(2):
            for fused, parts in PARTS.items():
                for kind in ("weight", "bias"):
                    names = [f"model.layers.{layer}.{part}.{kind}" for part in parts]
                    if names[0] in tensors:
                        tensors[f"model.layers.{layer}.{fused}.{kind}"] = np.concatenate(
                            [tensors.pop(n) for n in names]
                        )
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return BaseWeights(directory)


@pytest.mark.parametrize("source", ["divided", "fused"])
def test_magnitudes_follow_their_outputs(tmp_path: Path, source: str) -> None:
    targets = {"divided": make_target("float32", DIVIDED), "fused": make_target("float32", FUSED)}
    modules = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj") if source == "divided" else (QKV, GATE_UP)
    files = AdapterMaker(targets[source])(modules=modules, use_dora=True)
    found = {}
    for name, target in targets.items():
        base = base_weights(tmp_path / f"base-{name}", target.modules, name == "fused")
        packed = packed_for(files, target, tmp_path / name, base)
        found[name] = changes(packed, target), changes(packed, target, AFFINE)
    for ours, theirs in zip(found["divided"], found["fused"], strict=True):
        for key in ours.keys() | theirs.keys():
            assert_close(ours.get(key), theirs.get(key), 1e-5)
    assert any(np.abs(affine).max() > 0.1 for affine in found["fused"][1].values())


def refused(files: AdapterFiles, target: PackTarget) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as error:
        validate_files(files.config_bytes, files.tensor_bytes, target)
    return error.value


def test_a_missing_part_is_refused() -> None:
    files = AdapterMaker(make_target(modules=MODULES))(modules=PARTS[QKV])
    for name in [name for name in files.tensors if "k_proj" in name]:
        del files.tensors[name]
    error = refused(files, make_target(modules=FUSED_MODULES))
    assert (error.code, error.param) == (
        "missing_tensor",
        "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight",
    )


def test_a_fused_layer_beside_its_parts_is_refused() -> None:
    files = AdapterMaker(make_target(modules=MODULES))(modules=PARTS[QKV])
    fused = AdapterMaker(make_target(modules=FUSED_MODULES))(modules=(QKV,))
    files.tensors |= fused.tensors
    files.config["target_modules"].append("qkv_proj")
    for modules in (MODULES, FUSED_MODULES):
        assert refused(files, make_target(modules=modules)).code == "ambiguous_names"


def test_parts_of_another_size_are_refused() -> None:
    files = AdapterMaker(make_target(modules=MODULES))(modules=PARTS[QKV])
    name = "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"
    files.tensors[name] = np.ones((32, 4), np.float32)
    error = refused(files, make_target(modules=FUSED_MODULES))
    assert (error.code, error.param) == ("base_mismatch", name)


def test_ranks_that_add_up_to_too_much_are_refused() -> None:
    files = AdapterMaker(make_target(modules=MODULES))(rank=86, modules=PARTS[QKV])
    error = refused(files, make_target(modules=FUSED_MODULES))
    assert (error.code, error.param) == ("rank_out_of_range", "model.layers.0.self_attn.v_proj")


def test_a_base_without_these_layers_has_no_parts() -> None:
    files = AdapterMaker(make_target(modules=MODULES))(modules=("mlp.up_proj",))
    target = make_target(modules=(*FUSED_MODULES[:2], FUSED_MODULES[3]))
    assert refused(files, target).code == "unknown_module"
