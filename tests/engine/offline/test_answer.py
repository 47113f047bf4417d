"""The answer of an `LLM`, made of the engine's outputs."""

from __future__ import annotations

import pytest

from loramux.engine.offline.answer import Answer, Generation
from loramux.engine.protocol.messages import Add, Finished, SamplingParams, SequenceOutput, TokenLogprobs
from loramux.engine.text.text_tokenizer import TextTokenizer, load_tokenizer
from tests.demo_base import DEMO_BASE


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(load_tokenizer(DEMO_BASE / "tokenizer.json"))


def generation(
    tokenizer: TextTokenizer, text: str, stops: tuple[str, ...], num_together: int, min_tokens: int = 0
) -> Generation:
    """The answer to a prompt if the engine sends the bytes of `text` in outputs of `num_together` tokens."""
    ids = tuple(token for character in text for token in tokenizer.encode(character, add_special_tokens=False))
    add = Add(sequence_id="0", prompt=(5,), max_tokens=100, sampling=SamplingParams(min_tokens=min_tokens))
    answer = Answer(add, None, None, tokenizer, stops)
    for start in range(0, len(ids), num_together):
        together = ids[start : start + num_together]
        logprobs = tuple(TokenLogprobs(token_id=one, logprob=-1.0) for one in together)
        answer.take(SequenceOutput(sequence_id="0", token_ids=together, logprobs=logprobs))
    answer.take(Finished(sequence_id="0", reason="abort", prompt_tokens=1, completion_tokens=len(ids)))
    return answer.generation()


@pytest.mark.parametrize(
    ("stops", "min_tokens", "text", "stopped_by", "num_tokens"),
    [
        pytest.param(("bc", "abcd"), 0, "a", "bc", 3, id="two at once"),
        pytest.param(("b",), 0, "a", "b", 2, id="tokens after it"),
        pytest.param(("b",), 2, "abcda", "b", 6, id="not before min_tokens"),
        pytest.param(("never",), 0, "abcdabcd", None, 8, id="none"),
    ],
)
@pytest.mark.parametrize("num_together", [1, 3, 8])
def test_the_number_of_tokens_in_an_output_does_not_change_an_answer(
    tokenizer: TextTokenizer,
    stops: tuple[str, ...],
    min_tokens: int,
    text: str,
    stopped_by: str | None,
    num_tokens: int,
    num_together: int,
) -> None:
    found = generation(tokenizer, "abcdabcd", stops, num_together, min_tokens)
    assert (found.text, found.stopped_by) == (text, stopped_by)
    assert len(found.token_ids) == len(found.logprobs) == num_tokens


def test_a_failure_after_a_stop_string_changes_nothing(tokenizer: TextTokenizer) -> None:
    add = Add(sequence_id="0", prompt=(5,), max_tokens=100, sampling=SamplingParams())
    answer = Answer(add, None, None, tokenizer, ("b",))
    ids = tokenizer.encode("ab", add_special_tokens=False)
    assert answer.take(SequenceOutput(sequence_id="0", token_ids=ids))
    answer.take(Finished(sequence_id="0", reason="error", prompt_tokens=1, completion_tokens=2, code="non_finite"))
    assert (answer.text, answer.finish_reason) == ("a", "stop")
