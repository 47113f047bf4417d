from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from loramux.engine.protocol.messages import Add, Finished, SamplingParams, SequenceOutput
from loramux.platform.generation.answer_text import AnswerText, ChannelText, answer_text
from loramux.platform.generation.choice import Choice
from loramux.platform.generation.pending_deltas import JoinedDeltas
from loramux.platform.generation.plan import TextRules
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tool_calls.events import ArgumentsEvent, CallBegun, CallEnded, ReasoningEvent, TextEvent
from loramux.platform.tool_calls.harmony import MARKERS, MAX_HEADER_BYTES, Channels, Harmony
from tests.platform.harmony_base import tokens_of

PROMPT = "<|start|>user<|message|>Hm?<|end|><|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
ROME = '{"city": "Rome"}'


@dataclass
class Read:
    text: str = ""
    reasoning: str = ""
    calls: list[str] = field(default_factory=list)
    """Each call as `name arguments`. A call that has ended ends with `.`."""

    def take(self, answer: AnswerText) -> None:
        self.text += answer.text
        self.reasoning += answer.reasoning
        for event in answer.parts:
            match event:
                case CallBegun(index, name):
                    assert index == len(self.calls)
                    self.calls.append(f"{name} ")
                case ArgumentsEvent(index, text):
                    self.calls[index] += text
                case CallEnded(index):
                    self.calls[index] += "."
        answer.clear()


def channels(tokenizer: ModelTokenizer, prompt: tuple[int, ...], **changes: bool) -> Channels:
    harmony = Harmony.of(tokenizer.special_token_id, tokenizer.token_bytes)
    assert harmony is not None
    flags = {"has_reasoning": True, "has_calls": True, **changes}
    return Channels(format=harmony, place=harmony.end_of(prompt), **flags)


def read(
    tokenizer: ModelTokenizer,
    answer: str | tuple[str, ...],
    prompt: str = PROMPT,
    stops: tuple[str, ...] = (),
    **flags: bool,
) -> Read:
    is_cut_off = flags.pop("is_cut_off", False)
    ids = tokens_of(tokenizer, prompt)
    rules = TextRules(stops=stops, channels=channels(tokenizer, ids, **flags))
    text, found = answer_text(tokenizer, ids, rules), Read()
    for token_id in tokens_of(tokenizer, answer):
        text.feed(token_id, can_stop=True)
        found.take(text)
        if text.is_stopped:
            return found
    text.finish(can_stop=True, shown_token_id=None, is_cut_off=is_cut_off)
    found.take(text)
    return found


ANSWERS = {
    "reasoning, then text": (f"{ANALYSIS}Why?{NEXT}{FINAL}It is ½ hot.<|return|>", Read("It is ½ hot.", "Why?")),
    "text only": (f"{FINAL}Hot.", Read("Hot.")),
    "reasoning twice": (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", Read("c", "a\nb")),
    "a preamble, then a call": (
        f"{ANALYSIS}a{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{CALL}{ROME}<|call|>",
        Read("I look.", "a", [f"f {ROME}."]),
    ),
    "a recipient in the role": (
        f" to=functions.f<|channel|>commentary json<|message|>{ROME}<|call|>",
        Read(calls=[f"f {ROME}."]),
    ),
    "a call in another channel": (
        "<|channel|>analysis to=functions.f<|message|>{}<|call|>",
        Read(calls=["f {}."]),
    ),
    "two calls": (f"{CALL}{ROME}<|call|><|start|>assistant{CALL}<|call|>", Read(calls=[f"f {ROME}.", "f {}."])),
    "another tool": ("<|channel|>commentary to=python code<|message|>1+1<|call|>", Read(reasoning="1+1")),
    "no tool": ("<|channel|>commentary to=functions.<|message|>1", Read(reasoning="1")),
    "a message to the user": ("<|channel|>final to=user<|message|>1", Read("1")),
    "an unknown channel": (f"<|channel|>secret<|message|>a{NEXT}{FINAL}b", Read("b", "a")),
    "no channel": ("<|message|>Hi", Read("Hi")),
    "no end": (f"{ANALYSIS}a<|start|>assistant{FINAL}b", Read("b", "a")),
    "no end and no start": (f"{ANALYSIS}a{FINAL}b", Read("b", "a")),
    "no start": (f"{ANALYSIS}a<|end|>{FINAL}b", Read("b", "a")),
    "nested starts": (f"<|start|><|start|>assistant<|start|>assistant{FINAL}b", Read("b")),
    "two channels": (f"<|channel|>analysis{FINAL}b", Read("b")),
    "misplaced markers": (f"<|call|><|constrain|>{FINAL}a<|message|>b<|constrain|>c<|end|><|end|>", Read("abc")),
    "only a header": ("<|channel|>final" * 9, Read()),
    "no markers": ("Hi there.", Read()),
    "text that spells markers": (
        (FINAL, "a<|en", "d|>b<|chan", "nel|>analysis<|mess", "age|>c"),
        Read("a<|end|>b<|channel|>analysis<|message|>c"),
    ),
    "a header that spells markers": (
        ("<|channel|>commentary to=functions.f<|mess", "age|>", "<|message|>{}"),
        Read(calls=["f<|message|> {}."]),
    ),
    "a long name": (f"<|channel|>commentary to=functions.{'f' * 257}<|message|>1", Read(reasoning="1")),
    "a long header": (f"<|channel|>final {'x' * 3 * MAX_HEADER_BYTES} to=functions.f<|message|>a", Read("a")),
}


@pytest.mark.parametrize(("answer", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_channels_divide_an_answer(
    harmony_tokenizer: ModelTokenizer, answer: str | tuple[str, ...], expected: Read
) -> None:
    assert read(harmony_tokenizer, answer) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (f"{PROMPT}{FINAL}It is", Read(" hot.")),
        (f"{PROMPT}{ANALYSIS}I need", Read(reasoning=" hot.")),
        (f"{PROMPT}<|channel|>final", Read()),
        ("<|start|>user<|message|>Hm?<|end|>", Read()),
        ("Hm?", Read()),
    ],
    ids=["in the text", "in the reasoning", "in a header", "after a message", "no format"],
)
def test_answer_begins_where_the_prompt_ends(harmony_tokenizer: ModelTokenizer, prompt: str, expected: Read) -> None:
    assert read(harmony_tokenizer, " hot.", prompt) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"has_calls": False}, Read("b", f"a\n{ROME}")),
        ({"has_reasoning": False}, Read("a\nb", "", [f"f {ROME}."])),
    ],
    ids=["calls", "reasoning"],
)
def test_parts_that_are_not_separated_stay_text(
    harmony_tokenizer: ModelTokenizer, flags: dict[str, bool], expected: Read
) -> None:
    answer = f"{ANALYSIS}a{NEXT}{CALL}{ROME}{NEXT}{FINAL}b"
    assert read(harmony_tokenizer, answer, **flags) == expected


def test_call_that_reaches_the_limit_has_not_ended(harmony_tokenizer: ModelTokenizer) -> None:
    assert read(harmony_tokenizer, f'{CALL}{{"city"', is_cut_off=True) == Read(calls=['f {"city"'])


@pytest.mark.parametrize(
    ("answer", "stop", "expected"),
    [
        (f"{FINAL}one two three", "two", Read("one ")),
        (f"{ANALYSIS}one two{NEXT}{FINAL}three", "two", Read("", "one ")),
        (f"{CALL}{ROME}<|call|>", "Ro", Read(calls=['f {"city": "'])),
        (f"{ANALYSIS}on{NEXT}{FINAL}e two", "one", Read("e two", "on")),
        (f"{FINAL}a", "final", Read("a")),
        (f"{FINAL}a", "<|message|>", Read("a")),
    ],
    ids=["text", "reasoning", "arguments", "two messages", "header", "marker"],
)
def test_stop_strings_are_found_in_the_text_of_one_message(
    harmony_tokenizer: ModelTokenizer, answer: str, stop: str, expected: Read
) -> None:
    assert read(harmony_tokenizer, answer, stops=(stop,)) == expected


def test_reasoning_tokens_include_the_header_and_the_end(harmony_tokenizer: ModelTokenizer) -> None:
    ids = tokens_of(harmony_tokenizer, PROMPT)
    text = answer_text(harmony_tokenizer, ids, TextRules(channels=channels(harmony_tokenizer, ids)))
    reasoning = [f"{ANALYSIS}Why?<|end|>", f"<|start|>assistant{ANALYSIS}So.<|end|>"]
    for token_id in tokens_of(harmony_tokenizer, "".join([*reasoning, f"<|start|>assistant{FINAL}It is."])):
        text.feed(token_id, can_stop=True)
    assert text.num_reasoning == sum(len(tokens_of(harmony_tokenizer, one)) for one in reasoning)


def test_random_tokens_are_read_in_bounded_memory(harmony_tokenizer: ModelTokenizer) -> None:
    dice = random.Random(0)
    ids = tokens_of(harmony_tokenizer, PROMPT)
    texts = (*MARKERS, "analysis", "final", "commentary", " to=functions.f", "x" * 200)
    fragments = [*(tokens_of(harmony_tokenizer, text) for text in texts), (300, 301), (200,)]
    for _ in range(200):
        text = answer_text(harmony_tokenizer, ids, TextRules(channels=channels(harmony_tokenizer, ids)))
        assert isinstance(text, ChannelText)
        found, num_characters = Read(), 0
        for fragment in dice.choices(fragments, k=60):
            for token_id in fragment:
                text.feed(token_id, can_stop=True)
                num_characters += 1 + len(harmony_tokenizer.token_bytes(token_id))
            found.take(text)
            place = text.place
            assert max(len(place.role), len(place.channel or b"")) <= MAX_HEADER_BYTES
        text.finish(can_stop=True, shown_token_id=None, is_cut_off=False)
        found.take(text)
        shown = found.text + found.reasoning + "".join(found.calls)
        assert len(shown) <= num_characters
        assert not any(marker in shown for marker in MARKERS)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_messages_keep_their_order_in_joined_deltas(harmony_tokenizer: ModelTokenizer, size: int) -> None:
    ids = tokens_of(harmony_tokenizer, PROMPT)
    rules = TextRules(channels=channels(harmony_tokenizer, ids))
    choice = Choice(
        0, Add(sequence_id="s", prompt=ids, max_tokens=64, sampling=SamplingParams()), harmony_tokenizer, rules
    )
    preamble = "<|channel|>commentary<|message|>I look."
    answer = tokens_of(harmony_tokenizer, f"{ANALYSIS}a b{NEXT}{preamble}{NEXT}{ANALYSIS}c{NEXT}{CALL}{ROME}")
    outputs = [SequenceOutput(sequence_id="s", token_ids=answer[at : at + size]) for at in range(0, len(answer), size)]
    deltas = [delta for output in outputs if (delta := choice.feed(output)) is not None]
    last = choice.finish(Finished(sequence_id="s", reason="stop", prompt_tokens=1, completion_tokens=len(answer)))
    assert last is not None
    joined = JoinedDeltas([*deltas, last]).delta()
    messages = (ReasoningEvent("a b"), TextEvent("I look."), ReasoningEvent("c", "\n"))
    assert joined.parts == (*messages, CallBegun(0, "f"), ArgumentsEvent(0, ROME), CallEnded(0))
    assert (joined.text, joined.reasoning) == ("I look.", "a b\nc")
