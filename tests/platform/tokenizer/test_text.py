from __future__ import annotations

import json
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loramux.adapter_store.formats.version_files.answer_parsers import NO_CHOICE
from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.engine.chat_templates.template_refused import TemplateRefused
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.engine.text.detokenizer import StopStrings, echoed_text, new_detokenizer
from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.errors import InvalidRequest
from loramux.platform.requests.chat_prompt import ChatPrompts
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tokenizer.tenant_templates import TenantTemplates

ASKED = [{"role": "user", "content": "Hello"}]


def pieces(tokenizer: ModelTokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    detokenizer = new_detokenizer(tokenizer, prompt, skip_special_tokens=True)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.finish()]


@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=40))
def test_pieces_join_to_the_text(tokenizer: Any, text: str) -> None:
    ids = list(tokenizer.encode("x" + text))[1:]
    joined = pieces(tokenizer, [], ids)
    assert "".join(joined) == tokenizer.decode(ids)
    assert b"".join(tokenizer.token_bytes(token) for token in ids if token > 5).decode("utf-8", "replace")


@settings(max_examples=25, deadline=None)
@given(ids=st.lists(st.integers(0, 1023), max_size=30))
def test_arbitrary_tokens_decode_as_the_library_decodes_them(tokenizer: Any, ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, [], ids)) == tokenizer.decode(ids)
    assert isinstance("".join(pieces(tokenizer, ids[:7], ids)), str)


@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=20), places=st.lists(st.integers(0, 20), max_size=4))
def test_pieces_with_special_tokens_join_to_the_text_with_them(tokenizer: Any, text: str, places: list[int]) -> None:
    special, *ids = tokenizer.encode(text)
    for place in places:
        ids.insert(place, special)
    detokenizer = new_detokenizer(tokenizer, [special], skip_special_tokens=False)
    joined = "".join([*(detokenizer.feed(token) for token in ids), detokenizer.finish()])
    assert joined == tokenizer.decode(ids, skip_special_tokens=False)
    assert joined.count(tokenizer.token_bytes(special).decode()) >= len(places)


def test_character_is_emitted_once_complete(tokenizer: Any) -> None:
    ids = list(tokenizer.encode("🦊"))[1:]
    assert len(ids) == 4
    assert pieces(tokenizer, [], ids) == ["", "", "", "🦊", ""]
    assert pieces(tokenizer, [], ids[:2]) == ["", "", "\ufffd"]


REPLACEMENTS = st.text(st.sampled_from("\ufffdx é🦊"), max_size=30)


@settings(max_examples=100, deadline=None)
@given(text=REPLACEMENTS)
def test_no_character_is_lost_next_to_a_genuine_replacement_character(tokenizer: Any, text: str) -> None:
    ids = list(tokenizer.encode("x" + text))[1:]
    given_out = pieces(tokenizer, [], ids)
    assert "".join(given_out) == tokenizer.decode(ids)
    assert given_out[-1] == ""


@settings(max_examples=100, deadline=None)
@given(text=REPLACEMENTS)
def test_no_character_is_lost_with_byte_tokens(text: str) -> None:
    given_out = pieces(sentencepiece_like(), [1], [4 + byte for byte in text.encode()])
    assert "".join(given_out).lstrip(" ") == text.lstrip(" ")
    assert given_out[-1] == ""


def echoed(tokenizer: ModelTokenizer, ids: list[int], place: int) -> str:
    """The echo of the first `place` tokens, and the text of the tokens after them."""
    prompt = ids[:place]
    return echoed_text(tokenizer, prompt, skip_special_tokens=True) + "".join(pieces(tokenizer, prompt, ids[place:]))


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(6, 1023), max_size=12), place=st.integers(0, 12))
def test_an_echo_and_its_continuation_join_to_the_text_of_all_tokens(
    tokenizer: Any, ids: list[int], place: int
) -> None:
    assert echoed(tokenizer, ids, place) == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@example(text="\u0800\U00010000", place=6)
@given(text=st.text(max_size=6), place=st.integers(0, 20))
def test_a_prompt_can_end_inside_a_character_of_byte_tokens(text: str, place: int) -> None:
    tokenizer = sentencepiece_like()
    ids = [1, *(4 + byte for byte in text.encode())]
    assert echoed(tokenizer, ids, place + 1) == tokenizer.decode(ids) == f"Hello{text}"


def test_an_echo_has_the_complete_characters_of_its_prompt(tokenizer: Any) -> None:
    fox = list(tokenizer.encode("é🦊"))[1:]
    special = tokenizer.encode("")[0]
    assert echoed_text(tokenizer, [*fox[:-1], special], skip_special_tokens=True) == "é"
    byte_tokens = sentencepiece_like()
    ids = [1, *(4 + byte for byte in "é🦊".encode())]
    assert echoed_text(byte_tokens, ids[:-1], skip_special_tokens=True) == "Helloé"
    assert echoed_text(byte_tokens, ids, skip_special_tokens=True) == "Helloé🦊"


def test_genuine_replacement_character_is_not_held_back(tokenizer: Any) -> None:
    ids = list(tokenizer.encode("\ufffd"))[1:]
    assert pieces(tokenizer, [], ids)[-2:] == ["\ufffd", ""]


def test_special_token_inside_a_character_does_not_split_it(tokenizer: Any) -> None:
    fox = list(tokenizer.encode("🦊"))[1:]
    special = tokenizer.encode("")[0]
    assert pieces(tokenizer, [], [*fox[:2], *[special] * 10, *fox[2:]])[-2:] == ["🦊", ""]


@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=40))
def test_a_text_that_fits_is_never_refused_for_its_length(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.encode(text, len(ids)) == ids


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(demo_base: Path) -> None:
    raw = Tokenizer.from_file(str(demo_base / "tokenizer.json"))
    tokenizer = ModelTokenizer(raw, ChatTemplate.load(demo_base))
    most = 8 * max(len(token) for token in raw.get_vocab())
    assert len(tokenizer.encode("x" * most, 8)) > 8
    with pytest.raises(InvalidRequest) as text:
        tokenizer.encode("x" * (most + 1), 8)
    assert (text.value.code, text.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(InvalidRequest) as chat:
        tokenizer.encode_rendered("x" * (most + 1), 8)
    assert (chat.value.code, chat.value.param) == ("context_length_exceeded", "messages")


def test_other_threads_run_while_a_text_is_encoded(tokenizer: Any) -> None:
    num_turns, ends_s = 0, time.monotonic() + 60
    # On a busy machine, this thread can miss all of an encoding.
    while num_turns <= 5 and time.monotonic() < ends_s:
        encoding = threading.Thread(target=tokenizer.encode, args=("some words here " * 20_000,))
        encoding.start()
        num_turns = 0
        while encoding.is_alive():
            time.sleep(0.001)
            num_turns += 1
    assert num_turns > 5


def test_incomplete_bytes_are_not_held_back_forever(tokenizer: Any) -> None:
    continuation = list(tokenizer.encode("🦊"))[2]
    given_out = pieces(tokenizer, [], [continuation] * 20)
    assert any(given_out[:10])
    assert "".join(given_out) == "\ufffd" * 20


def sentencepiece_like() -> ModelTokenizer:
    """A vocabulary spelled like Llama 2's: spaces as U+2581, single bytes as <0xHH>."""
    words = ["<unk>", "\u2581Hello", "\u2581world", "ing", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return ModelTokenizer(tokenizer, None)


def test_sentencepiece_spaces_survive_between_prompt_and_answer() -> None:
    tokenizer = sentencepiece_like()
    fox = [4 + byte for byte in "🦊".encode()]
    assert pieces(tokenizer, [1], [2, 3, *fox]) == [" world", "ing", "", "", "", "🦊", ""]
    assert [tokenizer.token_bytes(token) for token in (2, 3, *fox[:1])] == [b" world", b"ing", b"\xf0"]
    assert tokenizer.token_bytes(100_000) == b""


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_shortened_text_has_a_character(limit: int) -> None:
    tokenizer = sentencepiece_like()
    assert len(tokenizer.encode("🦊", add_special_tokens=False)) > limit
    assert tokenizer.shortened("🦊🦊 Hello", limit) == "🦊"
    assert tokenizer.shortened("🦊", limit) == "🦊"
    assert tokenizer.shortened("", limit) == ""


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.text("abST", max_size=4), max_size=12),
    stops=st.lists(st.text("abST", min_size=1, max_size=4), min_size=1, max_size=3),
    is_shown=st.booleans(),
)
def test_stop_strings_cut_pieces_like_the_whole_text(parts: list[str], stops: list[str], is_shown: bool) -> None:
    finder = StopStrings(stops, is_shown=is_shown)
    shown, read = "", ""
    for part in parts:
        shown += finder.feed(part)
        read += part
        if finder.found is not None:
            break
    # The first piece that completes a stop string decides. Within that piece, the stop string that begins first wins.
    found = [(read.find(stop), len(stop)) for stop in stops if stop in read]
    assert (finder.found is not None) == bool(found)
    if found:
        start, length = min(found)
        assert finder.found == read[start : start + length]
        assert shown == read[: start + length if is_shown else start]
    else:
        assert shown + finder.flush() == read


def template_of(tmp_path: Path, template: Any, **config: Any) -> ChatTemplate | None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
    return ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}\n{{ m.role }}={{ m.content }};\n{% endfor %}", "user=Hello;\n"),
        ("{{ bos_token }}{{ messages[0]['content'] | tojson }}{{ eos_token }}", '<s>"Hello"</s>'),
        ("{% if tools is not none %}tools{% endif %}{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% for m in messages %}{% break %}x{% endfor %}.", "."),
        ([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}], "yes"),
    ],
    ids=["trimmed blocks", "special tokens", "no tools", "loop controls", "named templates"],
)
def test_templates_render_like_hugging_face(tmp_path: Path, template: Any, expected: str) -> None:
    loaded = template_of(tmp_path, template, bos_token="<s>", eos_token={"content": "</s>", "lstrip": False})
    assert loaded is not None
    assert loaded.render(ASKED) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
    ],
    ids=["refuses", "changes", "escapes", "beyond", "wrong types", "division"],
)
def test_a_template_error_is_a_refusal(tmp_path: Path, template: str) -> None:
    loaded = template_of(tmp_path, template)
    assert loaded is not None
    with pytest.raises(TemplateRefused) as caught:
        loaded.render(ASKED)
    assert caught.value.param == "messages"


def test_a_model_without_a_template_completes_but_does_not_chat(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    with closing(TenantTemplates({})) as tenants:
        prompts = ChatPrompts(sentencepiece_like().chat_template, tenants)
        with pytest.raises(InvalidRequest) as caught:
            prompts.render(ChatRequest(model="base", messages=ASKED), NO_CHOICE)
    assert caught.value.code == "no_chat_template"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", "[]", "JSON object"),
        ("chat_template.jinja", "{% for %}", "malformed"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("other", "", "missing"),
    ],
    ids=["cut", "list", "bad template", "bad tokenizer", "no tokenizer"],
)
def test_error_names_the_bad_model_file(tmp_path: Path, demo_base: Path, name: str, text: str, message: str) -> None:
    if name not in ("tokenizer.json", "other"):
        (tmp_path / "tokenizer.json").write_bytes((demo_base / "tokenizer.json").read_bytes())
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelNotSupported, match=message):
        ModelTokenizer.load(tmp_path)
