"""How texts are divided before byte-level BPE, by the name in `tokenizer.ggml.pre`.

llama.cpp's converter chooses the name. A name stands for the pre-tokenizer of the original `tokenizer.json`. Patterns
are the original ones, as far as llama.cpp documents them, because llama.cpp approximates some of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]
"""A part of a `tokenizer.json`."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    steps: tuple[Document, ...]
    normalizer: Document | None = None
    ignores_merges: bool = False
    """True if a whole word that is a token is not built by merges."""
    adds_bos: bool = False
    """Whether BOS is added if the file does not say so."""

    def document(self) -> Document:
        return {"type": "Sequence", "pretokenizers": list(self.steps)}


def _split(pattern: str) -> Document:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(*, splits: bool) -> Document:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits}


def _patterns(*patterns: str) -> tuple[Document, ...]:
    return (*map(_split, patterns), _byte_level(splits=False))


def _single_digits(*patterns: str) -> tuple[Document, ...]:
    return (*map(_split, patterns), _SINGLE_DIGITS, _byte_level(splits=False))


_SINGLE_DIGITS: Document = {"type": "Digits", "individual_digits": True}
_NFC: Document = {"type": "NFC"}

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _words(digits: str, symbols: str = _SYMBOLS, blanks: str = _BLANKS) -> str:
    """Return a pattern in the form of GPT-4's: a word includes the one character before it that is no letter."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{symbols}|{blanks}"


def _cased_words(digits: str, suffix: str, symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n/]*", no: str = "") -> str:
    """Return a pattern in the form of GPT-4o's, which also divides before capital letters."""
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{no}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{no}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}|{digits}|{symbols}|{_BLANKS}"


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_TEKKEN = _cased_words(r"\p{N}", "")
_GPT_4O = _cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?")
_KIMI = r"[\p{Han}]+|" + _cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?", _SYMBOLS, r"&&[^\p{Han}]")
_CASED_SCRIPTS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C "
    "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
    "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B "
    "2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
    "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943"
)
"""The code points of DeepSeek's letters, those of scripts with two cases. As text, many of them look alike."""
_DEEPSEEK_LETTERS = "".join("-".join(chr(int(end, 16)) for end in ends.split("-")) for ends in _CASED_SCRIPTS.split())
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_JAIS_2_BLANKS = (
    r"\s*[\r\n]+|" + "|".join(rf"\s{{{1 << power}}}(?!\S)" for power in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s{1}"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_CJK,
)
_DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)

_GPT2 = PreTokenizer((_byte_level(splits=True),))
_DIGITS_THEN_GPT2 = PreTokenizer((_SINGLE_DIGITS, _byte_level(splits=True)))
_LIKE_LLAMA3 = PreTokenizer(_patterns(_LLAMA3), ignores_merges=True, adds_bos=True)
_LIKE_GPT_4 = PreTokenizer(_patterns(_LLAMA3))
_LIKE_GPT_4O = PreTokenizer(_patterns(_GPT_4O))
_LIKE_QWEN2 = PreTokenizer(_patterns(_QWEN2))
_LIKE_DEEPSEEK_V3 = PreTokenizer(
    _patterns(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3_WORDS)
)
_DEFAULT_STEPS = _patterns(
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(_DEFAULT_STEPS),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "mellum", "granite-docling"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), _DIGITS_THEN_GPT2),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS_THEN_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "midm-2.0", "lfm2"), _LIKE_LLAMA3),
    "pixtral": _LIKE_LLAMA3,
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LIKE_GPT_4),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer(_patterns(_LLAMA3), ignores_merges=True)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _LIKE_GPT_4O),
    **dict.fromkeys(("qwen2", "f2llmv2"), PreTokenizer(_patterns(_QWEN2), normalizer=_NFC)),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "hunyuan", "stablelm2", "grok-2", "solar-open"), _LIKE_QWEN2),
    "qwen35": PreTokenizer(_patterns(_QWEN35), normalizer=_NFC),
    "tekken": PreTokenizer(_patterns(_TEKKEN), ignores_merges=True, adds_bos=True),
    "deepseek-llm": PreTokenizer(_single_digits(*_DEEPSEEK_LLM)),
    "deepseek-coder": PreTokenizer(_single_digits("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _LIKE_DEEPSEEK_V3),
    "falcon": PreTokenizer(
        (
            {"type": "Punctuation", "behavior": "Contiguous"},
            _byte_level(splits=True),
            {"type": "Digits", "individual_digits": False},
            _split("[0-9][0-9][0-9]"),
        )
    ),
    "kimi-k2": PreTokenizer(_patterns(_KIMI)),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        PreTokenizer(
            _patterns(
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
                r"|\s*[\r\n]|\s+(?!\S)|\s+"
            )
        ),
    ),
    "exaone-moe": PreTokenizer(
        _patterns(
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        )
    ),
    "youtu": PreTokenizer(
        _patterns(
            "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
            "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            _cased_words(r"\p{N}", f"{_CONTRACTION}?"),
        ),
        ignores_merges=True,
    ),
    "jais-2": PreTokenizer(_patterns(_words(r"\p{N}{1,3}", blanks=_JAIS_2_BLANKS))),
    "seed-coder": PreTokenizer(_patterns(_words(r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+"))),
    "minicpm5": PreTokenizer(_patterns(r"\p{N}{1,3}", _words(r"\p{N}+")), ignores_merges=True),
}
"""The pre-tokenizers by name, without those that only encoders have."""
