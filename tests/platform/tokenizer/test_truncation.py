"""Truncated texts keep the tokens around them, as with transformers' tokenizers."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from loramux.engine.text.truncation import Truncation
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

BOS, EOS, SEP = 0, 1, 2
FIRST, SECOND = "a b c d", "e f"


def tokenizer() -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(["<bos>", "<eos>", "<sep>", *"abcdef"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<sep>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<bos>", "<eos>", "<sep>"])
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        pair="<bos> $A <sep> $B <eos>",
        special_tokens=[("<bos>", BOS), ("<eos>", EOS), ("<sep>", SEP)],
    )
    return made


@pytest.mark.parametrize("keeps_end", [False, True], ids=["beginning", "end"])
@pytest.mark.parametrize("num_tokens", [2, 3, 5, 6, 9])
def test_the_tokens_around_a_text_are_kept(num_tokens: int, *, keeps_end: bool) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), truncation_side="left" if keeps_end else "right")
    expected = reference(FIRST, truncation=True, max_length=num_tokens)["input_ids"]
    truncation = Truncation(num_tokens, keeps_end)
    assert list(ModelTokenizer(tokenizer(), None).encode(FIRST, truncation=truncation)) == expected
    assert (expected[0], expected[-1]) == (BOS, EOS)


def test_a_pair_loses_its_last_or_first_tokens_of_text() -> None:
    one = ModelTokenizer(tokenizer(), None)

    def pair(num_tokens: int, *, keeps_end: bool) -> str:
        truncation = Truncation(num_tokens, keeps_end)
        ids = one.encode_pair(FIRST, SECOND, None, add_special_tokens=True, param="documents", truncation=truncation)
        return "".join(one.token_strings(ids))

    assert pair(7, keeps_end=False) == "<bos>abcd<sep><eos>"
    assert pair(7, keeps_end=True) == "<bos>cd<sep>ef<eos>"
    assert pair(9, keeps_end=False) == "<bos>abcd<sep>ef<eos>"


def test_fewer_tokens_than_those_around_a_text_can_be_kept() -> None:
    one = ModelTokenizer(tokenizer(), None)
    assert one.encode(FIRST, truncation=Truncation(1, keeps_end=False)) == (BOS,)
    assert one.encode(FIRST, truncation=Truncation(1, keeps_end=True)) == (EOS,)


@pytest.mark.parametrize("keeps_end", [False, True], ids=["beginning", "end"])
def test_special_tokens_within_a_text_are_truncated_with_it(*, keeps_end: bool) -> None:
    one, truncation = ModelTokenizer(tokenizer(), None), Truncation(2, keeps_end)
    ids = one.encode_rendered("<bos> a <eos>", truncation=truncation)
    assert "".join(one.token_strings(ids)) == ("a<eos>" if keeps_end else "<bos>a")
