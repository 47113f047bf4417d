"""A base's tokenizer with an adapter's own tokens gives the same results as transformers' tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.version_files.added_vocabulary import AddedToken, AddedVocabulary
from loramux.engine.text.detokenizer import new_detokenizer
from loramux.engine.text.extended_tokenizer import extended_tokenizer, next_token_id
from loramux.platform.errors import Unavailable
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tokenizer.version_tokenizers import MAX_KEPT, VersionTokenizers
from tests.demo_base import DEMO_BASE

BASE = Tokenizer.from_file(str(DEMO_BASE / "tokenizer.json"))
FIRST = next_token_id(BASE)
PLAIN = AddedToken(FIRST, "", special=False, lstrip=False, rstrip=False, single_word=False, normalized=False)
TOKENS = (
    replace(PLAIN, content="<|check|>", special=True),
    replace(PLAIN, id=FIRST + 1, content="<call>"),
    replace(PLAIN, id=FIRST + 2, content="Київ"),
    replace(PLAIN, id=FIRST + 3, content="cat", single_word=True),
    replace(PLAIN, id=FIRST + 4, content="[x]", lstrip=True, rstrip=True),
    replace(PLAIN, id=FIRST + 5, content="<|check|>!", normalized=True),
)
TEXTS = (
    "Hello <|check|> in Київ<call>",
    "a cat concatenates [x]   cats",
    "<|check|>!<|check|><|bos|>Київ <|end|>",
    "<|che",
    "",
)


def as_transformers_adds_them(base: Tokenizer, tokens: tuple[AddedToken, ...]) -> Tokenizer:
    whole = Tokenizer.from_str(base.to_str())
    for one in tokens:
        flags = {"lstrip": one.lstrip, "rstrip": one.rstrip, "single_word": one.single_word}
        token = tokenizers.AddedToken(one.content, normalized=one.normalized, special=one.special, **flags)
        whole.add_tokens([token])
    return whole


def test_texts_become_the_tokens_of_a_tokenizer_that_was_saved_with_them() -> None:
    expected = as_transformers_adds_them(BASE, TOKENS)
    found = extended_tokenizer(BASE, AddedVocabulary(FIRST + 6, TOKENS))
    assert found.get_added_tokens_decoder().keys() == expected.get_added_tokens_decoder().keys()
    for text in TEXTS:
        for adds in (True, False):
            ids = found.encode(text, add_special_tokens=adds).ids
            assert ids == expected.encode(text, add_special_tokens=adds).ids
            for skips in (True, False):
                assert found.decode(ids, skip_special_tokens=skips) == expected.decode(ids, skip_special_tokens=skips)
    assert FIRST not in BASE.encode(TEXTS[0]).ids
    assert next_token_id(BASE) == FIRST


def test_only_the_versions_tokenizer_knows_the_tokens() -> None:
    base = ModelTokenizer.load(DEMO_BASE)
    assert base.num_tokens == FIRST
    extended = base.with_vocabulary(AddedVocabulary(FIRST + 6, TOKENS))
    ids = extended.encode("<|check|>x<call>Київ", add_special_tokens=False)
    assert [token for token in ids if token >= FIRST] == [FIRST, FIRST + 1, FIRST + 2]
    assert not [token for token in base.encode("<|check|>x<call>Київ") if token >= FIRST]
    assert extended.special_token_id("<|check|>") == extended.marker_ids("<|check|>")["<|check|>"] == FIRST
    assert extended.special_token_id("<call>") is None
    assert extended.marker_ids("<call>") == {"<call>": FIRST + 1}
    assert base.marker_ids("<call>") == {}
    assert extended.token_bytes(FIRST + 2) == "Київ".encode()
    assert (extended.text_bytes(FIRST), base.token_bytes(FIRST)) == (b"", b"")
    detokenizer = new_detokenizer(extended, (), skip_special_tokens=True)
    assert "".join([*map(detokenizer.feed, ids), detokenizer.finish()]) == "x<call>Київ"


def gapped_base() -> Tokenizer:
    """A tokenizer whose added tokens cannot be added again one after the other."""
    document = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    document.add_tokens(["<one>", "<two>"])
    text = document.to_str().replace('"id":3', '"id":7').replace('"id": 3', '"id": 7')
    return Tokenizer.from_str(text)


def test_a_base_with_gaps_between_its_added_tokens_is_extended_too() -> None:
    base = gapped_base()
    first = next_token_id(base)
    extended = extended_tokenizer(base, AddedVocabulary(first + 1, (replace(PLAIN, id=first, content="<new>"),)))
    assert extended.encode("a<two><new>").ids == [0, base.token_to_id("<two>"), first]


REFUSED: dict[str, tuple[list[AddedToken], str, str]] = {
    "a control token of the template": (
        [replace(PLAIN, content="<|assistant|>", special=True)],
        "token_collision",
        "tokens[0].content",
    ),
    "an ordinary token": (
        [TOKENS[0], replace(PLAIN, id=FIRST + 1, content="e")],
        "token_collision",
        "tokens[1].content",
    ),
    "an id of the base": ([replace(TOKENS[0], id=5)], "token_collision", "tokens[0].id"),
    "a gap": ([replace(TOKENS[0], id=FIRST + 1)], "token_collision", "tokens[0].id"),
}


@pytest.mark.parametrize(("tokens", "code", "param"), REFUSED.values(), ids=REFUSED.keys())
def test_tokens_that_collide_with_the_bases_are_refused(tokens: list[AddedToken], code: str, param: str) -> None:
    with pytest.raises(AdapterRejected) as refused:
        extended_tokenizer(BASE, AddedVocabulary(FIRST + 9, tuple(tokens)))
    assert (refused.value.code, refused.value.param) == (code, param)


def reserved_base() -> Tokenizer:
    """A base with two reserved tokens that only its list of added tokens has, and one that its model has too."""
    base = Tokenizer(models.BPE({"a": 0, "b": 1, "<spare>": 2, "ab": 3}, [("a", "b")]))
    tokens = [tokenizers.AddedToken(content, special=True) for content in ("<spare>", "<reserved_0>", "<reserved_1>")]
    base.add_tokens(tokens)
    return base


def renamed(token_id: int, content: str, **flags: bool) -> AddedVocabulary:
    return AddedVocabulary(6, (), (replace(PLAIN, id=token_id, content=content, **{"special": True, **flags}),))


@pytest.mark.parametrize(("token_id", "old"), [(4, "<reserved_0>"), (2, "<spare>")])
def test_a_renamed_token_is_read_and_written_by_its_new_name(token_id: int, old: str) -> None:
    base = ModelTokenizer(reserved_base(), None)
    own = base.with_vocabulary(renamed(token_id, "<tool>"))
    expected = Tokenizer.from_str(reserved_base().to_str().replace(old, "<tool>"))
    for text in ("ab<tool>a", "b<tool><reserved_1>", "a" * 5000 + "<tool>"):
        ids = own.encode(text)
        assert list(ids) == expected.encode(text).ids
        for skips in (True, False):
            assert own.decode(ids, skip_special_tokens=skips) == expected.decode(ids, skip_special_tokens=skips)
            detokenizer = new_detokenizer(own, (), skip_special_tokens=skips)
            assert "".join([*map(detokenizer.feed, ids), detokenizer.finish()]).replace(" ", "") == expected.decode(
                ids, skip_special_tokens=skips
            ).replace(" ", "")
    assert base.decode([token_id], skip_special_tokens=False) == old
    both = base.with_vocabulary(
        replace(renamed(token_id, "<tool>"), tokens=(replace(PLAIN, id=base.num_tokens, content="<new>"),))
    )
    assert both.encode("<tool><new>") == (token_id, base.num_tokens)
    assert both.token_strings([token_id, base.num_tokens]) == ["<tool>", "<new>"]


def test_bytes_and_ids_of_a_renamed_token_are_its_own() -> None:
    base = ModelTokenizer(reserved_base(), None)
    own = base.with_vocabulary(renamed(4, "<tool>", special=False))
    assert (own.token_bytes(4), own.text_bytes(4), own.marker_ids("<tool>")) == (b"<tool>", b"<tool>", {"<tool>": 4})
    assert (base.token_bytes(4), base.text_bytes(4), base.token_id("<tool>")) == (b"<reserved_0>", b"", None)
    assert (own.token_id("<tool>"), own.special_token_id("<tool>"), own.token_bytes(5)) == (4, None, b"<reserved_1>")
    assert own.token_bytes(6) == b"", "the library's ID is not the model's"
    assert base.with_vocabulary(renamed(1, "b")).encode("ab") == base.encode("ab"), "the base has this token"


@pytest.mark.parametrize(
    ("vocabulary", "code", "param"),
    [
        (renamed(0, "<tool>"), "tokenizer_mismatch", "renamed[0].id"),
        (renamed(9, "<tool>"), "tokenizer_mismatch", "renamed[0].id"),
        (renamed(4, "<spare>"), "token_collision", "renamed[0].content"),
        (renamed(4, "a"), "token_collision", "renamed[0].content"),
    ],
    ids=["an ordinary token", "no token", "a control token", "an ordinary content"],
)
def test_renamings_that_do_not_suit_the_base_are_refused(vocabulary: AddedVocabulary, code: str, param: str) -> None:
    with pytest.raises(AdapterRejected) as refused:
        VersionTokenizers(ModelTokenizer(reserved_base(), None)).check_upload(vocabulary)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_the_facts_of_a_tokenizer_are_those_of_its_files() -> None:
    document = json.loads((DEMO_BASE / "tokenizer.json").read_text())
    found = ModelTokenizer.load(DEMO_BASE).base_vocabulary(1024, {})
    assert found.added_tokens == {token["content"]: token["id"] for token in document["added_tokens"]}
    assert found.num_tokens == FIRST


def test_a_token_of_which_nothing_remains_is_refused() -> None:
    """Otherwise, the library would find it between all characters."""
    base = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    base.normalizer = normalizers.Replace("x", "")
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(AdapterRejected) as refused:
        extended_tokenizer(base, AddedVocabulary(3, (replace(PLAIN, id=2, content="xx", normalized=True),)))
    assert (refused.value.code, refused.value.param) == ("invalid_vocabulary", "tokens[0].content")


def test_rows_for_all_tokens_are_required() -> None:
    check = VersionTokenizers(ModelTokenizer.load(DEMO_BASE)).check_upload
    check(AddedVocabulary(FIRST + 6, TOKENS))
    check(AddedVocabulary(FIRST + 99, TOKENS))
    for vocab_size, tokens in ((FIRST + 5, TOKENS), (FIRST - 1, ())):
        with pytest.raises(AdapterRejected) as refused:
            check(AddedVocabulary(vocab_size, tokens))
        assert (refused.value.code, refused.value.param) == ("token_mismatch", "vocab_size")


def test_tokenizers_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    base = ModelTokenizer.load(DEMO_BASE)
    made: list[Any] = []
    extend = ModelTokenizer.with_vocabulary
    monkeypatch.setattr(
        ModelTokenizer, "with_vocabulary", lambda self, vocabulary: made.append(vocabulary) or extend(self, vocabulary)
    )
    tokenizers_of = VersionTokenizers(base)
    assert tokenizers_of.find(None) is tokenizers_of.find(AddedVocabulary(FIRST, ())) is base
    vocabularies = [
        AddedVocabulary(FIRST + 1, (replace(PLAIN, content=f"<{number}>"),)) for number in range(MAX_KEPT + 1)
    ]
    first = tokenizers_of.find(vocabularies[0])
    assert tokenizers_of.find(vocabularies[0]) is first
    for vocabulary in vocabularies[1:]:
        tokenizers_of.find(vocabulary)
    assert len(made) == MAX_KEPT + 1
    assert tokenizers_of.find(vocabularies[0]) is not first


def test_tokens_for_another_base_are_unavailable() -> None:
    with pytest.raises(Unavailable, match="do not fit this server's tokenizer"):
        VersionTokenizers(ModelTokenizer.load(DEMO_BASE)).find(
            AddedVocabulary(9, (replace(PLAIN, id=8, content="<x>"),))
        )
