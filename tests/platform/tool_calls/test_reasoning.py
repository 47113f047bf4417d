from __future__ import annotations

import pytest

from loramux.platform.tool_calls.detection import last_marker, reasoning_markers_of
from loramux.platform.tool_calls.reasoning import HARMONY, REASONING_MARKERS, THINK, Markers, ReasoningSplitter


def split(pieces: list[str], markers: Markers, *, is_open: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(markers.begin, markers.end, is_open=is_open)
    parts = [*map(splitter.feed, pieces), splitter.flush()]
    return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize("markers", REASONING_MARKERS.values(), ids=REASONING_MARKERS)
@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "answer"),
    [
        pytest.param("BEGIN\nWhy?\nSo.\nEND\n\nYes. ", False, "Why?\nSo.", "Yes. ", id="thinks first"),
        pytest.param("\nWhy?\nEND\n\nYes.", True, "Why?", "Yes.", id="opened by the prompt"),
        pytest.param(" Yes.", False, "", " Yes.", id="no reasoning"),
        pytest.param("BEGIN\n\nEND\n\nYes.", False, "", "Yes.", id="empty reasoning"),
        pytest.param("BEGINWhy?", False, "Why?", "", id="cut while reasoning"),
        pytest.param("Yes BEGINnoEND", False, "", "Yes BEGINnoEND", id="marker within the answer"),
        pytest.param("aENDbEND", True, "a", "bEND", id="second end"),
        pytest.param("", True, "", "", id="nothing"),
    ],
)
def test_every_cut_gives_the_same_parts(
    markers: Markers, text: str, is_open: bool, reasoning: str, answer: str
) -> None:
    text, reasoning, answer = (
        one.replace("BEGIN", markers.begin).replace("END", markers.end) for one in (text, reasoning, answer)
    )
    expected = (reasoning, answer)
    assert split([text], markers, is_open=is_open) == expected
    assert split(list(text), markers, is_open=is_open) == expected
    for cut in range(len(text)):
        assert split([text[:cut], text[cut:]], markers, is_open=is_open) == expected


def test_reasoning_is_shown_before_it_ends() -> None:
    splitter = ReasoningSplitter(is_open=True)
    assert splitter.feed("First, ") == ("First, ", "")
    assert splitter.is_thinking


def test_markers_follow_from_the_template() -> None:
    markers = reasoning_markers_of("{{ '<think>' }}")
    assert markers is not None
    assert reasoning_markers_of("{{ messages }}") is None
    assert reasoning_markers_of("<|start|>assistant<|channel|>analysis<|message|>") is HARMONY
    # Phi's and harmony's messages end with the same token.
    assert reasoning_markers_of("<|assistant|>{{ message.content }}<|end|>") is None


@pytest.mark.parametrize(
    ("prompt", "continued", "last"),
    [
        ("<|user|>Hm?<|assistant|><think>\n", "", "<think>"),
        ("<|user|>Hm?<|assistant|><think>\n\n</think>\n\n", "", "</think>"),
        ("<|user|>What does <think> mean?<|assistant|>", "", None),
        ("<|user|>What does <think> mean?<|assistant|>It", "It", None),
        ("<|user|>Hm?<|assistant|><think>I need the", "<think>I need the", "<think>"),
        ("<|user|>Hm?<|assistant|><think>a</think>It", "<think>a</think>It", "</think>"),
        ("<|user|>Hm?<|assistant|><think>\n</think>\n<think>I", "<think>I", "<think>"),
        ("<|user|>Hm?<|assistant|><think>a</think>b<think>I", "<think>a</think>b<think>I", "<think>"),
    ],
)
def test_continued_turn_decides_whether_the_thinking_is_open(prompt: str, continued: str, last: str | None) -> None:
    assert last_marker(prompt, THINK, continued) == last
