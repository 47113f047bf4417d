"""Token marks for each sequence with penalties, kept on the device, where the newest token is available first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from loramux.engine.constraints.logit_penalties import LogitPenalties
from loramux.engine.device.accelerator import Accelerator
from loramux.engine.sequences.batch import SamplingRow

FIRST_SLOTS = 4
"""Number of slots in the first allocation. The number doubles as needed."""


@dataclass(slots=True)
class _Held:
    """A sequence's slot, and how many of the sequence's new tokens are marked there."""

    slot: int
    num_marked: int


class DeviceTokenMarks:
    """Marks as in `TokenMarks`, over the whole vocabulary: int32 `[num_slots, num_columns]`.

    A step has more columns than usual if one of its adapters adds tokens to the vocabulary. The marks are widened when
    such a step first occurs.

    The host builds the marks of a sequence that has none. Each step then marks the tokens that it chooses, which may
    not have reached the host when it submits the next step. A sequence's marks are kept as long as every step includes
    the sequence. When a sequence returns after missing a step, all its tokens have been committed, so the host can
    build its marks again. The number of slots in use therefore never exceeds a step's number of samples. A step without
    penalties frees the memory of all marks.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._marks: torch.Tensor | None = None
        self._free: list[int] = []
        self._held: dict[LogitPenalties, _Held] = {}

    @property
    def num_held(self) -> int:
        return len(self._held)

    def hold(self, samples: Sequence[SamplingRow], num_columns: int) -> None:
        """Build missing marks for the step's sequences, and drop the marks of all other sequences."""
        wanted = {
            one.logit_penalties: one.num_chosen
            for one in samples
            if one.logit_penalties is not None and one.logit_penalties.has_penalties
        }
        if not wanted:
            self._marks, self._free, self._held = None, [], {}
            return
        for penalties in [penalties for penalties in self._held if penalties not in wanted]:
            self._free.append(self._held.pop(penalties).slot)
        if self._marks is not None and self._marks.shape[1] < num_columns:
            self._marks = functional.pad(self._marks, (0, num_columns - self._marks.shape[1]))
        for penalties, num_chosen in wanted.items():
            if penalties in self._held and self._held[penalties].num_marked != num_chosen:
                # Accepted drafts are not marked. They have been committed, so the host can build the marks again.
                self._free.append(self._held.pop(penalties).slot)
            if penalties not in self._held:
                self._held[penalties] = self._build(penalties, num_chosen, num_columns)

    def slots(self, penalties: Sequence[LogitPenalties]) -> torch.Tensor:
        """Slots of these sequences' marks, int64 `[num_rows]`."""
        return self._accelerator.stage(torch.tensor([self._held[one].slot for one in penalties]))

    def rows(self, slots: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Marks in these slots, int32 `[num_rows, num_columns]`."""
        assert self._marks is not None
        return self._marks[slots, :num_columns]

    def mark(self, penalties: Sequence[LogitPenalties], slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Mark the tokens just chosen, `[num_rows]`. A negative id means that no token was chosen and that the sequence
        will end.
        """
        assert self._marks is not None
        places = slots, token_ids.long().clamp(min=0)
        self._marks[places] = self._marks[places] + 2
        for one in penalties:
            self._held[one].num_marked += 1

    def _build(self, penalties: LogitPenalties, num_chosen: int, num_columns: int) -> _Held:
        slot = self._take_slot(num_columns)
        assert self._marks is not None
        ids, marks = penalties.marks(num_chosen).tensors()
        row = self._marks[slot]
        row.zero_()
        row[self._accelerator.stage(ids)] = self._accelerator.stage(marks)
        return _Held(slot, num_chosen)

    def _take_slot(self, num_columns: int) -> int:
        if not self._free:
            num_slots, num_columns = (0, num_columns) if self._marks is None else self._marks.shape
            grown = torch.empty(
                (2 * num_slots or FIRST_SLOTS, num_columns), dtype=torch.int32, device=self._accelerator.device
            )
            if self._marks is not None:
                grown[:num_slots].copy_(self._marks)
            self._marks = grown
            self._free.extend(range(num_slots, len(grown)))
        return self._free.pop()
