from __future__ import annotations

from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.kernels.layout import LinearShape, PageGeometry
from tests.adapter_store.linears import fused_linears, llama_linears, outer_linears

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, NUM_LAYERS, VOCAB_SIZE = 32, 4, 2, 8, 48, 2, 70

FEATURES = (HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, INTERMEDIATE)

MODULES = llama_linears(*FEATURES)
FUSED_MODULES = fused_linears(*FEATURES)
OUTER_MODULES = outer_linears(VOCAB_SIZE, HIDDEN)


def make_target(
    dtype: str = "float32", modules: tuple[LinearShape, ...] = MODULES, outer_modules: tuple[LinearShape, ...] = ()
) -> PackTarget:
    geometry = PageGeometry(
        num_layers=NUM_LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        kv_itemsize=4,
        adapter_itemsize=4 if dtype == "float32" else 2,
    )
    return PackTarget(modules=modules, geometry=geometry, dtype=dtype, outer_modules=outer_modules)
