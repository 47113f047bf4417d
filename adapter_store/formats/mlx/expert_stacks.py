"""Converts mlx-lm's LoRAs of experts to those of PEFT's `target_parameters`.

For each of gate, up and down, mlx-lm has a lora_a `[num_experts, rank, in_features]` and a lora_b
`[num_experts, out_features, rank]`. Earlier releases stored the lora_a as `[num_experts * rank, in_features]`, with the
same bytes. PEFT has one A and one B for gate and up together: A has the ranks of gate before those of up, and B is
block-diagonal. Their rows and columns have the usual order of `stack_form.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.float_formats import ADAPTER_STORAGE
from loramux.adapter_store.formats.files.safetensors_header import TensorEntry
from loramux.adapter_store.formats.files.tensor_file import BLOCK_ELEMENTS, TensorFile
from loramux.adapter_store.formats.mlx.base_facts import BaseFacts
from loramux.adapter_store.formats.mlx.written_tensor import WrittenTensor, write_array
from loramux.adapter_store.formats.packed.module_places import A_SUFFIX, B_SUFFIX, TENSOR_PREFIX
from loramux.kernels.layout import MAX_RANK

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """mlx-lm's two tensors of one linear layer of all experts."""

    a: TensorEntry
    b: TensorEntry

    @property
    def rank(self) -> int:
        return self.b.shape[2]

    @property
    def out_features(self) -> int:
        return self.b.shape[1]

    @property
    def in_features(self) -> int:
        return self.a.shape[-1]

    @property
    def facts(self) -> tuple[object, ...]:
        """What gate and up must have in common."""
        return self.in_features, self.out_features, self.rank, self.a.dtype, self.b.dtype

    def rows_of_a(self, expert: int) -> range:
        """The rows of the lora_a that belong to an expert: one of three dimensions, or `rank` of two."""
        each = self.rank if len(self.a.shape) == 2 else 1
        return range(expert * each, (expert + 1) * each)

    def check(self, base: BaseFacts) -> None:
        """Raise AdapterRejected unless the two tensors fit each other, and the number of the base's experts."""
        a, b = self.a.shape, self.b.shape
        if len(b) != 3 or len(a) not in (2, 3):
            message = "lora_a and lora_b of experts must have three dimensions"
            raise AdapterRejected("wrong_dimensions", message, (self.a if len(b) == 3 else self.b).name)
        if b[0] != base.num_experts:
            found = f"{base.num_experts} experts" if base.num_experts else "no experts"
            message = f"the adapter has LoRAs of {b[0]} experts, but the base has {found}"
            raise AdapterRejected("base_mismatch", message, self.b.name)
        if b[2] > MAX_RANK:
            raise AdapterRejected("rank_out_of_range", f"a rank must be between 1 and {MAX_RANK}", self.b.name)
        if a[:-1] not in ((b[0], b[2]), (b[0] * b[2],)):
            message = f"the tensor must have {b[2]} ranks for each of {b[0]} experts, as lora_b has"
            raise AdapterRejected("rank_mismatch", message, self.a.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStack:
    """PEFT's A and B of one stacked weight of one layer.

    `parameter` is the weight's name, and `module` the name of the tensors' module in PEFT's file. `parts` has two items
    for gate and up, where None means that the adapter does not change it, and one item for down.
    """

    parameter: str
    module: str
    parts: tuple[ExpertPart | None, ...]
    num_experts: int
    alternates: bool

    @property
    def present(self) -> list[ExpertPart]:
        return [part for part in self.parts if part is not None]

    @property
    def rank(self) -> int:
        return sum(part.rank for part in self.present)

    def tensors(self, file: TensorFile) -> Iterator[WrittenTensor]:
        part, num_ranks = self.present[0], self.num_experts * self.rank
        name = TENSOR_PREFIX + self.module
        size = (num_ranks, part.in_features)
        yield WrittenTensor(name + A_SUFFIX, part.a.dtype, size, lambda out: self._write_a(file, out))
        size = (len(self.parts) * part.out_features, num_ranks)
        yield WrittenTensor(name + B_SUFFIX, part.b.dtype, size, lambda out: self._write_b(file, out))

    def _write_a(self, file: TensorFile, out: BinaryIO) -> None:
        for expert in range(self.num_experts):
            for part in self.present:
                out.writelines(file.stored(part.a.name, part.rows_of_a(expert)))

    def _write_b(self, file: TensorFile, out: BinaryIO) -> None:
        # Rows that alternate are written together, all others one part after the other.
        together = [range(len(self.parts))] if self.alternates else [range(i, i + 1) for i in range(len(self.parts))]
        out_features = self.present[0].out_features
        for indices in together:
            step = max(1, BLOCK_ELEMENTS // (len(indices) * self.rank * self.num_experts))
            for begin in range(0, out_features, step):
                self._write_rows(file, out, indices, range(begin, min(begin + step, out_features)))

    def _write_rows(self, file: TensorFile, out: BinaryIO, indices: range, outputs: range) -> None:
        """Write the rows of B that compute these outputs of some of the parts."""
        dtype = ADAPTER_STORAGE[self.present[0].b.dtype]
        rows = np.zeros((len(outputs), len(indices), self.rank, self.num_experts), dtype)
        first = 0
        for index, part in enumerate(self.parts):
            if part is None:
                continue
            if index in indices:
                columns = range(outputs.start * part.rank, outputs.stop * part.rank)
                block = file.raw_columns(part.b.name, columns).reshape(self.num_experts, len(outputs), part.rank)
                rows[:, index - indices.start, first : first + part.rank] = block.transpose(1, 2, 0)
            first += part.rank
        write_array(out, rows)


def expert_stacks(above: str, parts: Mapping[str, ExpertPart], base: BaseFacts) -> Sequence[ExpertStack]:
    """Return the stacks of one layer, whose names begin with `above`. Raises AdapterRejected."""
    for part in parts.values():
        part.check(base)
    gate, up, down = (parts.get(name) for name in (GATE, UP, DOWN))
    if gate is not None and up is not None:
        if gate.facts != up.facts:
            message = f"{GATE} and {UP} of experts must have LoRAs of equal shapes and dtypes"
            raise AdapterRejected("base_mismatch", message, up.b.name)
        if gate.rank + up.rank > MAX_RANK:
            message = f"with LoRAs of both {GATE} and {UP} of experts, the rank may be at most {MAX_RANK // 2}"
            raise AdapterRejected("rank_out_of_range", message, gate.b.name)
    found = [(base.gate_up, (gate, up)), (base.down, (down,))]
    trained = [(stack, chosen) for stack, chosen in found if any(part is not None for part in chosen)]
    stacks = []
    # PEFT wraps the module of the experts once for each weight, and the wrapper of the last weight is the outermost.
    for depth, (stack, chosen) in enumerate(reversed(trained)):
        if stack is None:
            name = next(part for part in chosen if part is not None).b.name
            message = "adapters cannot change the experts of this base: train without the keys of its experts"
            raise AdapterRejected("unexpected_tensor", message, name)
        stacks.append(
            ExpertStack(
                parameter=above + stack,
                module=above + stack.rpartition(".")[0] + depth * ".base_layer",
                parts=chosen,
                num_experts=base.num_experts,
                alternates=base.alternates and len(chosen) > 1,
            )
        )
    return stacks
