from __future__ import annotations

import json
import math
import struct
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from loramux.adapter_store.formats.packed.module_places import TENSOR_PREFIX, module_places
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.validation.validator import Limits, SubprocessValidator, ValidationJob
from loramux.kernels.layout import MAX_EXTRA_TOKENS, MAX_RANK, PageGeometry, trained_rows_of
from tests.adapter_store.linears import llama_linears, outer_linears


def make_base(hidden: int, kv: int, intermediate: int, num_layers: int, vocab: int, dtype: str) -> PackTarget:
    itemsize = 4 if dtype == "float32" else 2
    return PackTarget(
        modules=llama_linears(hidden, hidden, kv, intermediate),
        geometry=PageGeometry(num_layers, kv // 64, 64, itemsize, itemsize),
        dtype=dtype,
        outer_modules=outer_linears(vocab, hidden),
    )


def write_largest(target: PackTarget, directory: Path, has_copies: bool) -> ValidationJob:
    """An adapter for every module, with the highest rank and the widest dtype.

    With `has_copies`, the file also contains whole weights of the head and the embedding.
    """
    job = ValidationJob(directory / "config", directory / "tensors", directory / "canonical", directory / "packed")
    names = [shape.name.rsplit(".", 1)[-1] for shape in (*target.modules, *target.outer_modules)]
    job.config.write_text(json.dumps({"peft_type": "LORA", "r": MAX_RANK, "lora_alpha": 16, "target_modules": names}))
    header, position = {}, 0
    for place in module_places(target):
        shapes = [
            (place.a_name, (MAX_RANK, place.shape.in_features)),
            (place.b_name, (place.shape.out_features, MAX_RANK)),
        ]
        if has_copies and place.layer is None:
            shapes.append((f"{TENSOR_PREFIX}{place.key}.base_layer.weight", trained_rows_of(place.shape)))
        for name, shape in shapes:
            end = position + shape[0] * shape[1] * 4
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, end]}
            position = end
    text = json.dumps(header).encode()
    block = (np.random.default_rng(0).standard_normal(1 << 20) * 0.01).astype(np.float32).tobytes()
    with job.tensors.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, position, len(block)):
            file.write(block[: position - begin])
    return job


def assert_it_passes(target: PackTarget, directory: Path, has_copies: bool) -> None:
    job = write_largest(target, directory, has_copies)
    size = job.tensors.stat().st_size
    whole = 4 * sum(math.prod(trained_rows_of(module)) for module in target.outer_modules)
    magnitudes = 4 * sum(place.shape.out_features for place in module_places(target))
    further = 4 * MAX_EXTRA_TOKENS * sum(trained_rows_of(module)[1] for module in target.outer_modules)
    largest = size + magnitudes + further + (0 if has_copies else whole)
    # The rest is the header.
    assert target.max_tensors_bytes - (1 << 20) < largest <= target.max_tensors_bytes
    limits = Limits.for_upload(target, size)
    with closing(SubprocessValidator(niceness=0)) as validator:
        start = time.monotonic()
        accepted = validator.validate(job, target)
    took_s = time.monotonic() - start
    for path in (job.tensors, job.canonical, job.packed):
        # The server packs an adapter with whole weights, because it compares them with the base's.
        path.unlink(missing_ok=has_copies and path == job.packed)
    usage = accepted.report["usage"]
    print(
        f"{size >> 20} MiB of tensors, {target.max_payload_bytes >> 20} MiB of pages: {took_s:.1f} s of "
        f"{limits.time_s:.0f} s, {usage['max_rss_bytes'] >> 20} MiB resident, "
        f"{usage['max_address_bytes'] >> 20} of {limits.memory_bytes >> 20} MiB of addresses"
    )
    # The largest adapter, which the server packs, also has gains and shifts.
    if has_copies:
        assert target.max_pages * 0.95 <= accepted.num_pages <= target.max_pages
    assert usage["max_rss_bytes"] < usage["max_address_bytes"] < limits.memory_bytes
    # The specified memory limit is 512 MiB plus the maximum size of the inputs.
    assert limits.memory_bytes == (512 << 20) + max(target.max_tensors_bytes, target.max_payload_bytes)


@pytest.mark.parametrize("has_copies", [False, True], ids=["packed", "whole weights"])
def test_largest_adapter_of_a_small_base_passes(tmp_path: Path, has_copies: bool) -> None:
    target = make_base(256, 128, 512, 4, 4000, "float32")
    assert Limits.for_upload(target, target.max_tensors_bytes).time_s == 10
    assert_it_passes(target, tmp_path, has_copies)


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_copies", [False, True], ids=["packed", "whole weights"])
def test_largest_adapter_of_an_8b_base_passes(tmp_path: Path, dtype: str, has_copies: bool) -> None:
    assert_it_passes(make_base(4096, 1024, 14336, 32, 128_256, dtype), tmp_path, has_copies)
