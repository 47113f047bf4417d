from __future__ import annotations

from typing import Any

import numpy as np

from loramux.adapter_store.formats.files.float_formats import to_bfloat16_bits
from tests.adapter_store.adapter_files import AdapterFiles
from tests.adapter_store.validation.hostile import LAYER, MARK, Q_A, Q_B, Change, Hostile, good_files, header_file

HEAD = "base_model.model.lm_head."
EMBEDDING = "base_model.model.model.embed_tokens."
OUTER: dict[str, Any] = {"modules": ("model.embed_tokens", "lm_head")}
Q_MODULE = "model.layers.0.self_attn.q_proj"
ONES = np.ones((4, 32), np.float32)
MAGNITUDE, BIAS = Q_A.replace("lora_A.weight", "lora_magnitude_vector"), Q_B.replace("weight", "bias")


def _pair(name: str, code: str, param: str | None, change: Change, **adapter: Any) -> Hostile:
    return Hostile(name=name, code=code, param=param, change=change, adapter=adapter)


def _tensor(name: str, code: str, tensor: str, values: Any, param: str | None = None, **adapter: Any) -> Hostile:
    def change(files: AdapterFiles) -> None:
        if values is None:
            del files.tensors[tensor]
        else:
            files.tensors[tensor] = values

    return _pair(name, code, param or tensor, change, **adapter)


def _vector(last: float) -> np.ndarray:
    """A vector of 32 ones, except the last value."""
    return np.append(np.ones(31, np.float32), np.float32(last))


def _renamed(old: str, new: str) -> Change:
    def change(files: AdapterFiles) -> None:
        files.tensors = {name.replace(old, new): tensor for name, tensor in files.tensors.items()}

    return change


def _only(part: str) -> Change:
    def change(files: AdapterFiles) -> None:
        files.tensors = {name: tensor for name, tensor in files.tensors.items() if part in name}

    return change


def _transposed(files: AdapterFiles) -> None:
    files.tensors = {name: np.ascontiguousarray(tensor.T) for name, tensor in files.tensors.items()}


def _swapped(files: AdapterFiles) -> None:
    files.tensors[Q_A], files.tensors[Q_B] = files.tensors[Q_B], files.tensors[Q_A]


def _cut(rank: int) -> Change:
    """Give the tensors a different rank from the configuration's."""

    def change(files: AdapterFiles) -> None:
        for name, tensor in files.tensors.items():
            files.tensors[name] = np.ascontiguousarray(tensor[:rank] if "lora_A" in name else tensor[:, :rank])

    return change


def _copied(old: str, new: str) -> Change:
    """Add the same tensors again under another naming scheme."""

    def change(files: AdapterFiles) -> None:
        files.tensors |= {name.replace(old, new): tensor for name, tensor in files.tensors.items()}

    return change


def _half_renamed(old: str, new: str) -> Change:
    """Rename half of the tensors to another naming scheme."""

    def change(files: AdapterFiles) -> None:
        files.tensors = {
            name.replace(old, new) if "v_proj" in name else name: tensor for name, tensor in files.tensors.items()
        }

    return change


V_A = Q_A.replace("q_proj", "v_proj")

COMBINATIONS = [
    _tensor("A is missing", "missing_tensor", Q_A, None),
    _tensor("B is missing", "missing_tensor", Q_B, None),
    _pair("all of A is missing", "missing_tensor", Q_A, _only("lora_B")),
    _pair("a module is missing", "missing_tensor", Q_A, _only("v_proj")),
    _pair("last layer is missing", "base_mismatch", LAYER.format(1, "A"), _only("layers.0.")),
    _pair("first layer is missing", "missing_tensor", Q_A, _only("layers.1.")),
    _pair("no tensor is left", "missing_tensor", Q_A, _only(MARK)),
    _pair(
        "configuration names fewer modules",
        "unexpected_tensor",
        V_A,
        lambda files: files.config.update(target_modules=["q_proj"]),
    ),
    _pair(
        "configuration names more modules",
        "missing_tensor",
        Q_A.replace("q_proj", "k_proj"),
        lambda files: files.config.update(target_modules=["q_proj", "k_proj", "v_proj"]),
    ),
    _pair(
        "configuration names fewer layers",
        "unexpected_tensor",
        LAYER.format(1, "A"),
        lambda files: files.config.update(layers_to_transform=[0]),
    ),
    _pair("a layer beyond the base", "base_mismatch", LAYER.format(2, "A"), _renamed("layers.1.", "layers.2.")),
    _pair("layer 9999", "base_mismatch", LAYER.format(9999, "A"), _renamed("layers.1.", "layers.9999.")),
    _pair(
        "layer of 20 digits",
        "unexpected_tensor",
        LAYER.format("9" * 20, "A"),
        _renamed("layers.1.", f"layers.{'9' * 20}."),
    ),
    _pair(
        "layer with a zero in front", "unexpected_tensor", LAYER.format("01", "A"), _renamed("layers.1.", "layers.01.")
    ),
    _pair("layer with a minus", "unexpected_tensor", LAYER.format("-1", "A"), _renamed("layers.1.", "layers.-1.")),
    _pair("layer in Arabic digits", "unexpected_tensor", LAYER.format("١", "A"), _renamed("layers.1.", "layers.١.")),
    _tensor("foreign tensor", "unexpected_tensor", MARK, ONES),
    _tensor("tensor without a name", "unexpected_tensor", "", ONES, param=""),
    _tensor("tensor that leads upwards", "unexpected_tensor", "../../kilroy", ONES),
    _tensor("tensor with a line break", "unexpected_tensor", "kil\nroy", ONES, param="kil?roy"),
    _tensor("tensor that turns the line around", "unexpected_tensor", "\u202ekilroy", ONES, param="?kilroy"),
    _tensor("tensor with an escape sequence", "unexpected_tensor", "\x1b[31mkilroy", ONES, param="?[31mkilroy"),
    _tensor("tensor of look-alikes", "unexpected_tensor", Q_A.replace("q_proj", "q_рroj"), ONES),
    _tensor("DoRA's magnitudes", "unexpected_tensor", MAGNITUDE, ONES),
    _tensor("a bias", "unexpected_tensor", BIAS, ONES),
    _tensor("magnitudes are missing", "missing_tensor", MAGNITUDE, None, use_dora=True),
    _tensor("too many magnitudes", "base_mismatch", MAGNITUDE, np.ones(33, np.float32), use_dora=True),
    _tensor("a matrix of magnitudes", "wrong_dimensions", MAGNITUDE, np.ones((32, 1), np.float32), use_dora=True),
    _tensor("a magnitude of zero", "invalid_magnitude", MAGNITUDE, _vector(0.0), use_dora=True),
    _tensor("a magnitude of minus zero", "invalid_magnitude", MAGNITUDE, _vector(-0.0), use_dora=True),
    _tensor("an infinite magnitude", "not_finite", MAGNITUDE, _vector(np.inf), use_dora=True),
    _tensor("a magnitude that is not a number", "not_finite", MAGNITUDE, _vector(np.nan), use_dora=True),
    _tensor("a huge magnitude", "norm_too_large", MAGNITUDE, _vector(1e30), use_dora=True),
    _tensor("biases are missing", "missing_tensor", BIAS, None, lora_bias=True),
    _tensor("too few biases", "base_mismatch", BIAS, np.ones(31, np.float32), lora_bias=True),
    _tensor("an infinite bias", "not_finite", BIAS, _vector(-np.inf), lora_bias=True),
    _tensor("a huge bias", "norm_too_large", BIAS, _vector(1e9), lora_bias=True),
    _pair(
        "a bias of an embedding",
        "unsupported_config",
        "lora_bias",
        lambda files: files.config.update(lora_bias=True),
        **OUTER,
    ),
    _tensor("base's own weights", "unexpected_tensor", Q_A.replace("lora_A", "base_layer"), ONES),
    _tensor("base's head where PEFT does not load it", "unexpected_tensor", HEAD + "base_layer.weight", ONES),
    _tensor("base's head beside a base's head", "unexpected_tensor", HEAD + "weight", ONES, **OUTER),
    _tensor("embedding named as a linear", "unexpected_tensor", EMBEDDING + "lora_A.weight", ONES, **OUTER),
    _tensor("head named as an embedding", "unexpected_tensor", HEAD + "lora_embedding_A", ONES, **OUTER),
    _pair("A and B are swapped", "base_mismatch", Q_A, _swapped),
    _pair("A and B are transposed", "base_mismatch", Q_A, _transposed),
    _tensor("a wider base", "base_mismatch", Q_A, np.ones((4, 64), np.float32)),
    _tensor("a narrower base", "base_mismatch", Q_A, np.ones((4, 16), np.float32)),
    _tensor("a base of more heads", "base_mismatch", Q_B, np.ones((64, 4), np.float32)),
    _tensor("a larger vocabulary", "base_mismatch", HEAD + "lora_B.weight", np.ones((71, 4), np.float32), **OUTER),
    _tensor(
        "a smaller vocabulary", "base_mismatch", EMBEDDING + "lora_embedding_A", np.ones((4, 64), np.float32), **OUTER
    ),
    _tensor("rank of A", "rank_mismatch", Q_A, np.ones((5, 32), np.float32)),
    _tensor("rank of B", "rank_mismatch", Q_B, np.ones((32, 3), np.float32)),
    _tensor("A without rows", "empty_tensor", Q_A, np.ones((0, 32), np.float32)),
    _tensor("B without columns", "empty_tensor", Q_B, np.ones((32, 0), np.float32)),
    _tensor("A without columns", "empty_tensor", Q_A, np.ones((4, 0), np.float32)),
    _pair("rank of all tensors", "rank_mismatch", Q_A, _cut(2)),
    _pair("rank of the configuration", "rank_mismatch", Q_A, lambda files: files.config.update(r=8)),
    _pair(
        "rank of one pattern",
        "rank_mismatch",
        LAYER.format(1, "A"),
        lambda files: files.config.update(rank_pattern={"layers.1.self_attn.q_proj": 2}),
    ),
    _pair(
        "half an adapter of a fused base",
        "ambiguous_names",
        Q_A.replace("q_proj", "v_proj"),
        _renamed("q_proj", "qkv_proj"),
    ),
    _pair("an adapter of GPT-2", "unexpected_tensor", None, _renamed("model.layers.", "transformer.h.")),
    _pair("kohya's names", "unexpected_tensor", None, _renamed("lora_A.weight", "lora_down.weight")),
    _pair("a wrapper of another kind", "unexpected_tensor", None, _renamed("self_attn.", "self_attn.kilroy.")),
    _pair("three models deep", "unexpected_tensor", None, _renamed("model.layers", "model.model.model.layers")),
    _pair("names of two kinds", "ambiguous_names", None, _half_renamed("base_model.model.", "")),
    _pair("names of two adapters", "ambiguous_names", None, _half_renamed(".weight", ".kilroy.weight")),
    _pair("every tensor twice", "ambiguous_names", None, _copied("base_model.model.", "")),
    _pair("every tensor twice, once compiled", "ambiguous_names", None, _copied("layers.", "_orig_mod.layers.")),
    _pair("two adapters in a file", "ambiguous_names", None, _copied(".weight", ".default.weight")),
    _pair("an adapter's name that leads upwards", "unexpected_tensor", None, _renamed(".weight", "./../kilroy.weight")),
]


def _value(
    name: str, code: str, tensor: str, value: float, param: str | None = None, dtype: Any = np.float32
) -> Hostile:
    def change(files: AdapterFiles) -> None:
        files.tensors[tensor][1, 2] = value

    return _pair(name, code, param or tensor, change, dtype=dtype)


def _scaled(name: str, code: str, param: str | None, a: float, b: float, **config: Any) -> Hostile:
    def change(files: AdapterFiles) -> None:
        for tensor_name, tensor in files.tensors.items():
            tensor *= a if "lora_A" in tensor_name else b
        files.config |= config

    return _pair(name, code, param, change)


def _bfloat16(name: str, code: str, param: str | None, bits: int) -> Hostile:
    """A valid adapter in bfloat16 with one value replaced by the given bits."""

    def tensors() -> bytes:
        header: dict[str, Any] = {}
        data = b""
        for tensor_name, tensor in good_files().tensors.items():
            values = to_bfloat16_bits(tensor)
            if tensor_name == Q_A:
                values[1, 2] = bits
            end = len(data) + values.nbytes
            header[tensor_name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [len(data), end]}
            data += values.tobytes()
        return header_file(header, data)

    return Hostile(name=name, code=code, param=param, tensors=tensors)


NUMBERS = [
    _value("NaN in A", "not_finite", Q_A, np.nan),
    _value("NaN in B", "not_finite", Q_B, np.nan),
    _value("infinity in A", "not_finite", Q_A, np.inf),
    _value("minus infinity in B", "not_finite", Q_B, -np.inf),
    _value("NaN in float16", "not_finite", Q_A, np.nan, dtype=np.float16),
    _value("infinity in float16", "not_finite", Q_A, np.inf, dtype=np.float16),
    _value("minus infinity in float16", "not_finite", Q_B, -np.inf, dtype=np.float16),
    _bfloat16("NaN in bfloat16", "not_finite", Q_A, 0x7FC0),
    _bfloat16("signalling NaN in bfloat16", "not_finite", Q_A, 0x7F81),
    _bfloat16("negative NaN in bfloat16", "not_finite", Q_A, 0xFFC0),
    _bfloat16("infinity in bfloat16", "not_finite", Q_A, 0x7F80),
    _bfloat16("minus infinity in bfloat16", "not_finite", Q_A, 0xFF80),
    _bfloat16("largest bfloat16", "norm_too_large", Q_A, 0x7F7F),
    _bfloat16("next bfloat16 after the largest weight", "norm_too_large", Q_A, 0x4780),
    _tensor("all NaN in the head", "not_finite", HEAD + "lora_B.weight", np.full((70, 4), np.nan, np.float32), **OUTER),
    _value("largest float32", "norm_too_large", Q_A, float(np.finfo(np.float32).max)),
    _value("a weight above float16", "norm_too_large", Q_B, 65505.0),
    _value("a weight below float16", "norm_too_large", Q_B, -65505.0),
    _value("a weight at float16's limit", "norm_too_large", Q_A, 65504.0, param=Q_MODULE, dtype=np.float16),
    _scaled("diverged training", "norm_too_large", Q_MODULE, 100, 100),
    _scaled("diverged, A alone", "norm_too_large", Q_MODULE, 1e4, 1),
    _scaled("small weights of a huge scale", "norm_too_large", Q_MODULE, 1, 1, lora_alpha=65536),
    _scaled("product beyond float32", "norm_too_large", Q_A, 1e20, 1e20),
    _scaled("one half beyond, the other tiny", "norm_too_large", Q_A, 1e20, 1e-20),
    _scaled("B was never trained", "zero_effect", None, 1, 0),
    _scaled("A is zero", "zero_effect", None, 0, 1),
    _scaled("both are zero", "zero_effect", None, 0, 0),
    _scaled("minus zeros", "zero_effect", None, 1, -0.0),
    _scaled("product below the smallest number", "zero_effect", None, 1e-30, 1e-30),
    _scaled("denormal numbers", "zero_effect", None, 1e-44, 1e-3),
    _scaled("scale below the smallest number", "zero_effect", None, 1, 1, lora_alpha=5e-324),
]

WEIGHTS = [*COMBINATIONS, *NUMBERS]
