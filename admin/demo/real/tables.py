"""The real demo's tables: the base and its adapters side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux.admin.client.safe_text import safe_text

if TYPE_CHECKING:
    from loramux.admin.demo.mixed_batch import DemoAnswer


@dataclass(frozen=True, slots=True)
class Graded:
    """`adapter` names the task, also if the base answered."""

    adapter: str
    answer: DemoAnswer
    is_right: bool

    @property
    def is_by_base(self) -> bool:
        return self.answer.adapter is None


def print_side_by_side(console: Console, graded: Sequence[Graded]) -> None:
    """Print one prompt of each task, with both answers."""
    table = Table(title="The same prompts without and with the adapters", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("adapter", no_wrap=True)
    for column in ("prompt", "base", "with adapter"):
        table.add_column(column, ratio=1)
    for adapter in _adapters(graded):
        before, after = (_of(graded, adapter, is_by_base)[0].answer for is_by_base in (True, False))
        # The model's output is text, never markup.
        texts = (after.question.text, before.text, after.text)
        table.add_row(adapter, *(Text(safe_text(text.strip())) for text in texts))
    console.print(table)


def print_accuracy(console: Console, graded: Sequence[Graded]) -> None:
    table = Table(title="Right answers to held-out prompts", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("adapter")
    for column in ("prompts", "base", "with adapter"):
        table.add_column(column, justify="right")
    for adapter in _adapters(graded):
        num_prompts = len(_of(graded, adapter, True))
        table.add_row(adapter, str(num_prompts), *(f"{accuracy(graded, adapter, by):.1%}" for by in (True, False)))
    console.print(table)


def accuracy(graded: Sequence[Graded], adapter: str, is_by_base: bool) -> float:
    answered = _of(graded, adapter, is_by_base)
    return sum(one.is_right for one in answered) / len(answered)


def _of(graded: Sequence[Graded], adapter: str, is_by_base: bool) -> list[Graded]:
    return [one for one in graded if (one.adapter, one.is_by_base) == (adapter, is_by_base)]


def _adapters(graded: Sequence[Graded]) -> list[str]:
    return list(dict.fromkeys(one.adapter for one in graded))
