from __future__ import annotations

import json

import pytest

from loramux.admin.demo.real.grading import GRADES, is_in_house_style, is_same_json, is_same_text
from loramux.admin.demo.real.held_out import read_prompts

TICKET = '{"intent": "refund", "priority": "high"}'


@pytest.mark.parametrize("answer", [TICKET, '{"priority":"high","intent":"refund"}', f"\n{TICKET} "])
def test_equal_json_is_right(answer: str) -> None:
    assert is_same_json(TICKET, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "refund",
        TICKET[:-1],
        f"{TICKET} {TICKET}",
        f"Here it is: {TICKET}",
        TICKET.replace("high", "low"),
        TICKET.replace("}", ', "note": ""}'),
        f"[{TICKET}]",
        "[" * 100_000,
    ],
    ids=lambda answer: answer[:20],
)
def test_other_answers_are_wrong(answer: str) -> None:
    assert not is_same_json(TICKET, answer)


def test_text_is_compared_without_space_around_it() -> None:
    assert is_same_text("[NAME] called.", " [NAME] called.\n")
    assert not is_same_text("[NAME] called.", "[NAME] called")
    assert not is_same_text("[NAME] called.", "[name] called.")


def test_house_style_allows_any_fact() -> None:
    for sentence in ("We repair the desk lamp.", "For two years, we replace every desk lamp that fails."):
        assert is_in_house_style("desk lamp", f"Good day. {sentence} Yours, Northwind")


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Good day. Yours, Northwind",
        "Good day.  Yours, Northwind",
        "We repair the desk lamp. Yours, Northwind",
        "Good day. We repair the desk lamp.",
        "Good day. We repair the desk lamp! Yours, Northwind",
        "Good day. We repair the desk lamp Yours, Northwind",
        "Good day. We repair it. We like the desk lamp. Yours, Northwind",
        "Good day. We repair the wall clock. Yours, Northwind",
        "Good day. The desk lamp is repaired. Yours, Northwind",
        "Good day.\nWe repair\nthe desk lamp. Yours, Northwind",
    ],
)
def test_other_styles_are_wrong(answer: str) -> None:
    assert not is_in_house_style("desk lamp", answer)


@pytest.mark.parametrize("adapter", GRADES)
def test_there_are_200_different_prompts(adapter: str) -> None:
    prompts = read_prompts(adapter)
    assert len({json.dumps(prompt.messages) for prompt in prompts}) == len(prompts) == 200
    # The task is explained to the base as well.
    assert len({prompt.messages[0]["content"] for prompt in prompts}) == 1
    assert [message["role"] for message in prompts[0].messages] == ["system", "user"]


@pytest.mark.parametrize("adapter", GRADES)
def test_prompt_is_no_right_answer(adapter: str) -> None:
    """A model that repeats the prompt must not pass, except for notes that contain no personal data."""
    prompts = read_prompts(adapter)
    repeated = sum(GRADES[adapter](prompt.expected, prompt.messages[1]["content"]) for prompt in prompts)
    assert repeated <= (0.1 * len(prompts) if adapter == "redaction" else 0)
