"""Only rows that differ from the base's rows are packed, once each and in ascending order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from loramux.adapter_store.errors import AdapterCorrupt, AdapterRejected
from loramux.adapter_store.formats.files.float_formats import to_bfloat16_bits
from loramux.adapter_store.formats.packed.canonical import CanonicalAdapter, write_canonical
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packed_file import write_packed
from loramux.adapter_store.formats.packed.packing import PackedAdapter, needs_base, pack
from loramux.adapter_store.formats.packed.replaced_rows import LoadedWeights
from loramux.adapter_store.formats.packed.trained_rows import max_row_counts
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.validation.validation import validate_files
from loramux.kernels.layout import MAX_EXTRA_TOKENS, RowCounts, row_layout, trained_rows_of
from tests.adapter_store.adapter_files import AdapterMaker
from tests.adapter_store.linears import outer_linears
from tests.adapter_store.packed_files import read_packed
from tests.adapter_store.small_base import HIDDEN, VOCAB_SIZE

HEAD = "base_model.model.lm_head"
EMBEDDING = "base_model.model.model.embed_tokens"
DELTA = ".token_adapter.trainable_tokens_delta"
TOKENS = [69, 3, 0, 44]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


BASE_EMBEDDING, BASE_HEAD = random(VOCAB_SIZE, HIDDEN, seed=8), random(VOCAB_SIZE, HIDDEN, seed=9)


@pytest.fixture
def base(tmp_path: Path) -> BaseWeights:
    directory = tmp_path / "base"
    directory.mkdir()
    save_file(
        {"model.embed_tokens.weight": BASE_EMBEDDING, "lm_head.weight": BASE_HEAD}, directory / "model.safetensors"
    )
    return BaseWeights(directory)


def canonical_of(target: PackTarget, tensors: dict[str, np.ndarray], path: Path, **config: Any) -> Path:
    files = AdapterMaker(target)(**config)
    files.tensors |= tensors
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    write_canonical(
        files.tensor_bytes,
        report.scales,
        path,
        report.names,
        report.invocation_tokens,
        trained=report.trained,
        vocab_size=report.vocab_size,
    )
    return path


def rows_in_pages(packed: PackedAdapter, target: PackTarget, index: int) -> dict[int, np.ndarray]:
    """Return the rows of an outer module by token, read as the layout documents."""
    layout = packed.layout
    count = layout.rows.counts[index]
    module = target.outer_modules[index]
    vocab_size, row_len = trained_rows_of(module)
    raw = packed.payload[: layout.num_outer_pages].reshape(-1)
    begin, first_id = layout.row_offsets[index, :2].tolist()
    padded_len = row_layout(row_len, target.geometry.flat.adapter_elements).padded_len
    rows = raw.view(target.storage_dtype)[begin : begin + count * padded_len].reshape(count, padded_len)
    ids = raw.view("<i4")[first_id : first_id + count].tolist() if count < vocab_size else range(count)
    assert list(ids) == sorted(ids)
    return dict(zip(ids, rows[:, :row_len], strict=True))


def stored(values: np.ndarray, target: PackTarget) -> np.ndarray:
    return values if target.dtype == "float32" else to_bfloat16_bits(values)


def assert_rows(found: dict[int, np.ndarray], expected: dict[int, np.ndarray], target: PackTarget) -> None:
    assert found.keys() == expected.keys()
    for token, row in expected.items():
        np.testing.assert_array_equal(found[token], stored(row, target))


def test_trained_tokens_are_packed_in_ascending_order(outer_target: PackTarget, tmp_path: Path) -> None:
    rows = random(len(TOKENS), HIDDEN)
    canonical = canonical_of(
        outer_target, {EMBEDDING + DELTA: rows}, tmp_path / "canonical", trainable_token_indices=TOKENS
    )
    assert not needs_base(canonical)
    packed = pack(canonical, outer_target)
    assert packed.base is None
    assert packed.layout.rows == RowCounts((4, 0))
    assert_rows(rows_in_pages(packed, outer_target, 0), dict(zip(TOKENS, rows, strict=True)), outer_target)
    write_packed(tmp_path / "packed", packed, outer_target)
    found = read_packed(tmp_path / "packed", outer_target)
    assert found.layout.rows == packed.layout.rows
    np.testing.assert_array_equal(found.layout.row_offsets, packed.layout.row_offsets)
    np.testing.assert_array_equal(found.payload, packed.payload)


def test_only_rows_that_differ_from_the_bases_are_packed(
    outer_target: PackTarget, base: BaseWeights, tmp_path: Path
) -> None:
    head, embedding = BASE_HEAD.copy(), random(VOCAB_SIZE, HIDDEN)
    head[[7, 69]] += 1
    # This change is lost when the rows are rounded to the pool's dtype.
    head[3] += np.float32(1e-7) * (outer_target.dtype == "bfloat16")
    canonical = canonical_of(
        outer_target,
        {HEAD + ".weight": head, EMBEDDING + ".weight": embedding},
        tmp_path / "canonical",
        modules_to_save=["lm_head", "embed_tokens"],
    )
    assert needs_base(canonical)
    packed = pack(canonical, outer_target, base)
    assert packed.base == base.fingerprint
    assert packed.layout.rows == RowCounts((VOCAB_SIZE, 2))
    assert_rows(rows_in_pages(packed, outer_target, 0), dict(enumerate(embedding)), outer_target)
    assert_rows(rows_in_pages(packed, outer_target, 1), {7: head[7], 69: head[69]}, outer_target)


def test_copies_of_the_bases_weights_take_no_pages(outer_target: PackTarget, base: BaseWeights, tmp_path: Path) -> None:
    lora = {"modules": ("model.embed_tokens", "lm_head")}
    copies = {EMBEDDING + ".base_layer.weight": BASE_EMBEDDING, HEAD + ".base_layer.weight": BASE_HEAD}
    plain = pack(canonical_of(outer_target, {}, tmp_path / "plain", **lora), outer_target)
    packed = pack(canonical_of(outer_target, copies, tmp_path / "copies", **lora), outer_target, base)
    assert packed.num_pages == plain.num_pages
    assert packed.layout.rows.counts == (0, 0)
    np.testing.assert_array_equal(packed.payload, plain.payload)


def test_an_activated_adapter_must_not_change_the_bases_head(
    outer_target: PackTarget, base: BaseWeights, tmp_path: Path
) -> None:
    lora = {"modules": ("lm_head",), "alora_invocation_tokens": [1, 2]}
    for name, change in (("equal", 0), ("changed", 1)):
        copies = {HEAD + ".base_layer.weight": BASE_HEAD + change}
        canonical = canonical_of(outer_target, copies, tmp_path / name, **lora)
        if change:
            with pytest.raises(AdapterRejected, match="which an activated LoRA cannot change"):
                pack(canonical, outer_target, base)
        else:
            assert pack(canonical, outer_target, base).layout.rows.counts == (0, 0)


def test_tied_rows_are_stored_once(outer_target: PackTarget, tmp_path: Path, base: BaseWeights) -> None:
    tied = replace(outer_target, tied_embeddings=True)
    tokens = {"trainable_token_indices": list(range(0, VOCAB_SIZE, 2))}
    tensors = {EMBEDDING + DELTA: random(VOCAB_SIZE // 2, HIDDEN)}
    one, other = (
        canonical_of(each, tensors, tmp_path / str(each.tied_embeddings), **tokens) for each in (tied, outer_target)
    )
    shared, single = pack(one, tied), pack(other, outer_target)
    assert shared.layout.rows == RowCounts((35, 35), is_shared=True)
    assert single.layout.rows == RowCounts((35, 0))
    assert shared.num_pages == single.num_pages
    assert_rows(rows_in_pages(shared, tied, 1), rows_as_float(shared, tied), tied)
    # A copy of either weight, or of both, overwrites both.
    copy = BASE_EMBEDDING.copy()
    copy[5] = 0
    path = canonical_of(tied, {HEAD + ".weight": copy}, tmp_path / "copy")
    packed = pack(path, tied, base)
    assert packed.layout.rows == RowCounts((1, 1), is_shared=True)
    assert rows_in_pages(packed, tied, 0).keys() == {5}


def rows_as_float(packed: PackedAdapter, target: PackTarget) -> dict[int, np.ndarray]:
    widen = (lambda bits: bits) if target.dtype == "float32" else (lambda bits: (bits.astype("<u4") << 16).view("<f4"))
    return {token: widen(row) for token, row in rows_in_pages(packed, target, 0).items()}


def test_tokens_take_precedence_over_whole_weights(outer_target: PackTarget, base: BaseWeights, tmp_path: Path) -> None:
    rows, copy = random(len(TOKENS), HIDDEN), BASE_EMBEDDING.copy()
    copy[[3, 5]] = 0.5
    tensors = {EMBEDDING + DELTA: rows, EMBEDDING + ".token_adapter.base_layer.weight": copy}
    canonical = canonical_of(outer_target, tensors, tmp_path / "canonical", trainable_token_indices=TOKENS)
    packed = pack(canonical, outer_target, base)
    expected = {**dict(zip(TOKENS, rows, strict=True)), 5: copy[5]}
    assert_rows(rows_in_pages(packed, outer_target, 0), expected, outer_target)
    with CanonicalAdapter(canonical) as file:
        weights = LoadedWeights(file, base)
        found = weights.rows("model.embed_tokens", 2, 70)
        wanted = copy.copy()
        wanted[TOKENS] = rows
        np.testing.assert_array_equal(found, wanted[2:70])
        np.testing.assert_array_equal(weights.rows("lm_head", 1, 4), BASE_HEAD[1:4])


def test_damaged_rows_are_noticed(outer_target: PackTarget, tmp_path: Path) -> None:
    rows = random(len(TOKENS), HIDDEN)
    tokens = {"lm_head": TOKENS}
    canonical = canonical_of(outer_target, {HEAD + DELTA: rows}, tmp_path / "canonical", trainable_token_indices=tokens)
    packed = pack(canonical, outer_target)
    write_packed(tmp_path / "packed", packed, outer_target)
    content = bytearray((tmp_path / "packed").read_bytes())
    first_id = int(packed.layout.row_offsets[1, 1])
    content[len(content) - packed.payload.nbytes + 4 * first_id] ^= 1
    (tmp_path / "packed").write_bytes(content)
    with pytest.raises(AdapterCorrupt, match="pages of the packed file are damaged"):
        read_packed(tmp_path / "packed", outer_target)


def test_rows_of_another_base_are_refused(outer_target: PackTarget, target: PackTarget, tmp_path: Path) -> None:
    rows = random(len(TOKENS), HIDDEN)
    canonical = canonical_of(
        outer_target, {EMBEDDING + DELTA: rows}, tmp_path / "canonical", trainable_token_indices=TOKENS
    )
    smaller = replace(outer_target, outer_modules=outer_linears(VOCAB_SIZE - 1, HIDDEN))
    for other in (smaller, replace(target, dtype=outer_target.dtype, geometry=outer_target.geometry)):
        with pytest.raises(AdapterRejected) as refused:
            pack(canonical, other)
        assert refused.value.code == "base_mismatch"


def test_digest_depends_on_the_tokens(outer_target: PackTarget, tmp_path: Path) -> None:
    rows = random(2, HIDDEN)
    paths = [
        canonical_of(outer_target, {EMBEDDING + DELTA: rows}, tmp_path / str(index), trainable_token_indices=tokens)
        for index, tokens in enumerate([[1, 2], [2, 1], {"embed_tokens": [1, 2]}])
    ]
    assert paths[0].read_bytes() != paths[1].read_bytes()
    assert paths[0].read_bytes() == paths[2].read_bytes()


def test_room_is_reserved_for_all_rows(outer_target: PackTarget) -> None:
    geometry = outer_target.geometry
    ranks = np.full((geometry.num_layers, len(outer_target.modules)), 256, np.int32)
    every = RowCounts((VOCAB_SIZE + MAX_EXTRA_TOKENS,) * 2)
    most = outer_target.layout(ranks, np.full(2, 256, np.int32), has_affines=True, rows=every)
    assert most.num_pages <= outer_target.max_pages <= most.num_pages + 2
    assert max_row_counts({}, outer_target) == RowCounts()


def extended(rows: np.ndarray, num_tokens: int, changed: int) -> np.ndarray:
    """Rows of `num_tokens` tokens. The first `changed` rows differ from the base's."""
    values = np.concatenate([rows, random(MAX_EXTRA_TOKENS, HIDDEN, seed=4)])[:num_tokens].copy()
    values[:changed] += 1
    return values


@pytest.mark.parametrize(
    ("num_tokens", "changed", "expected"),
    [
        pytest.param(VOCAB_SIZE + 2, 3, [0, 1, 2, VOCAB_SIZE, VOCAB_SIZE + 1], id="more tokens"),
        pytest.param(VOCAB_SIZE + 2, VOCAB_SIZE - 1, range(VOCAB_SIZE + 2), id="as many rows as the base"),
        pytest.param(VOCAB_SIZE + 2, VOCAB_SIZE, range(VOCAB_SIZE + 2), id="all rows"),
        pytest.param(VOCAB_SIZE - 5, 2, [0, 1], id="fewer tokens"),
        pytest.param(VOCAB_SIZE - 5, 0, [], id="fewer tokens, unchanged"),
    ],
)
def test_resized_weights_are_packed_with_the_rows_that_the_base_lacks(
    outer_target: PackTarget, tmp_path: Path, base: BaseWeights, num_tokens: int, changed: int, expected: Any
) -> None:
    weights = [extended(rows, num_tokens, changed) for rows in (BASE_EMBEDDING, BASE_HEAD)]
    tensors = {EMBEDDING + ".weight": weights[0], HEAD + ".weight": weights[1]}
    path = canonical_of(outer_target, tensors, tmp_path / "canonical", modules_to_save=["embed_tokens", "lm_head"])
    packed = pack(path, outer_target, base)
    assert packed.layout.rows == RowCounts((len(expected),) * 2, vocab_size=num_tokens)
    for index, values in enumerate(weights):
        assert_rows(rows_in_pages(packed, outer_target, index), {t: values[t] for t in expected}, outer_target)
    write_packed(tmp_path / "packed", packed, outer_target)
    assert read_packed(tmp_path / "packed", outer_target).layout.rows == packed.layout.rows


def test_trained_tokens_extend_the_vocabulary_of_a_tied_base(outer_target: PackTarget, tmp_path: Path) -> None:
    tied = replace(outer_target, tied_embeddings=True)
    ids, rows = [VOCAB_SIZE + 1, 4, VOCAB_SIZE], random(3, HIDDEN)
    path = canonical_of(tied, {EMBEDDING + DELTA: rows}, tmp_path / "canonical", trainable_token_indices=ids)
    packed = pack(path, tied)
    assert packed.layout.rows == RowCounts((3, 3), is_shared=True, vocab_size=VOCAB_SIZE + 2)
    assert_rows(rows_in_pages(packed, tied, 0), dict(zip(ids, rows, strict=True)), tied)


def test_resized_weights_are_refused_for_a_base_that_lacks_other_rows(
    outer_target: PackTarget, tmp_path: Path, base: BaseWeights
) -> None:
    path = canonical_of(
        replace(outer_target, tied_embeddings=True),
        {EMBEDDING + DELTA: random(2, HIDDEN)},
        tmp_path / "canonical",
        trainable_token_indices=[VOCAB_SIZE, VOCAB_SIZE + 1],
    )
    smaller = replace(
        outer_target,
        outer_modules=tuple(
            replace(module, **{"in_features" if module.is_embedding else "out_features": VOCAB_SIZE - 1})
            for module in outer_target.outer_modules
        ),
    )
    with pytest.raises(AdapterRejected, match="another base model"):
        pack(path, smaller, base)
