from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from rich.console import Console

from loramux.admin.demo.mixed_batch import DemoAnswer, DemoQuestion
from loramux.admin.demo.real.tables import Graded, accuracy, print_accuracy, print_side_by_side


def graded(adapter: str, is_by_base: bool, text: str, is_right: bool) -> Graded:
    question = DemoQuestion("helpdesk", "key", "model", [{"role": "user", "content": f"[b]about[/b] {adapter}"}], 8)
    answer = DemoAnswer(
        question=question,
        adapter=None if is_by_base else f"helpdesk/{adapter}@1",
        text=text,
        prompt_tokens=1,
        completion_tokens=1,
        time_to_first_token_s=0.1,
        message={},
        reasoning="",
    )
    return Graded(adapter, answer, is_right)


GRADED = [
    graded("tickets", True, "[red]Hello", False),
    graded("tickets", False, '{"intent": "bug"}', True),
    graded("tickets", True, "again", True),
    graded("tickets", False, "wrong", False),
    graded("redaction", True, "base", False),
    graded("redaction", False, "[NAME] called.", True),
]


def shown(show: Callable[[Console, Sequence[Graded]], None]) -> str:
    written = io.StringIO()
    show(Console(file=written, width=140), GRADED)
    return written.getvalue()


def test_accuracy_counts_base_and_adapter_apart() -> None:
    assert [accuracy(GRADED, name, by) for name in ("tickets", "redaction") for by in (True, False)] == [0.5, 0.5, 0, 1]
    rows = [line.split() for line in shown(print_accuracy).splitlines()]
    assert ["tickets", "2", "50.0%", "50.0%"] in rows
    assert ["redaction", "1", "0.0%", "100.0%"] in rows


def test_answers_stand_side_by_side_and_are_no_markup() -> None:
    lines = shown(print_side_by_side).splitlines()
    (row,) = [line for line in lines if line.strip().startswith("tickets")]
    assert [text in row for text in ("[b]about[/b] tickets", "[red]Hello", '{"intent": "bug"}')] == [True] * 3
    assert any("[NAME] called." in line for line in lines)
    assert "again" not in "".join(lines)
