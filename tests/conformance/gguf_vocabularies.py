"""GGUF files with a given tokenizer, and texts in many scripts to compare tokenizers with."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SCRIPTS = (
    "the quick brown fox jumps over a lazy dog while it's RAINING and we'll see THAT they've won",
    "I'M don't O'Neill HTTPServer camelCase",
    "Zażółć gęślą jaźń naïve façade Ærøskøbing Straße İstanbul ſhort coöperate",
    "быстрая коричневая лиса Привет МИР ёжик",
    "γρήγορη αλεπού Ελληνικά ᾠδή ὤν ΣΊΣΥΦΟΣ",
    "快速的棕色狐狸跳过了懒狗 我想在apple工作1314151天～ 繁體中文，標點。",
    "素早い茶色の狐がカタカナとひらがな ーー、。「」",
    "빠른 갈색 여우 안녕하세요 한국어 ㅋㅋㅋ",
    "الثعلب البني السريع مرحبا ١٢٣ السَّلَامُ",
    "तेज़ भूरी लोमड़ी नमस्ते १२३ क्षत्रिय",
    "สวัสดีชาวโลก กำลังทดสอบ ๑๒๓",
    "កាន់តែពិសេសអាច សួស្តី",
    "তাড়াতাড়ি বাদামী শিয়াল தமிழ் தெலுగు ಕನ್ನಡ",
    "שלום עולם עִבְרִית",
    "გამარჯობა მსოფლიო Հայերեն ᎣᏏᏲ ᚠᚢᚦ 𐐀𐐨",
)
CODE = (
    "def f(x: int) -> str:\n    return f'{x:>10}' if x != 0 else \"\\n\"\n",
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i] * b[i]; // dot\n}\n",
    "SELECT * FROM t WHERE a >= 10 AND b <> 'x''y';\r\n",
    '{"key": [1, 2.5e-10, null, true], "nested": {"a/b": "c\\\\d"}}\n',
    "<div class='x'>&amp; <b>bold</b></div>\n",
    "#!/bin/sh\nset -eu && echo \"$HOME\" | grep -v '^#' >> out.txt\n",
    "x=1;y=2;;;//###===>>>---___***~~~^^^```\"\"\"'''\n",
    "http://example.org/a_b-c?d=e&f=%20#g user@example.org C:\\dir\\file.txt\n",
)
EMOJI = (
    "🦊",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "👍🏽",
    "🇩🇪",
    "☃️",
    "𝔘𝔫𝔦",
    "\u200d",
    "\ufeff",
    "e\u0301",
    "ﬁ",
    "①②",
    "½¾²³",
    "Ⅻ",
    "▁",
    "<0x0A>",
)
BLANKS = (
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\n\n\n",
    "\t",
    "\t\t",
    "\r\n",
    " \n",
    "\n ",
    "\u00a0",
    "\u3000",
    "\u2003",
    " " * 40,
    "\n" * 35,
)


def mixed_texts(num_chars: int, controls: Sequence[str], seed: int = 1) -> Iterator[str]:
    """Yield texts of up to about 1,500 characters that have `num_chars` characters together."""
    draw = random.Random(seed)
    words = [word for line in SCRIPTS for word in line.split()]
    while num_chars > 0:
        pieces: list[str] = []
        for _ in range(draw.randint(1, 240)):
            match draw.choices(range(8), (50, 14, 4, 8, 14, 6, 3, 2))[0]:
                case 0:
                    pieces.append(draw.choice(words) + draw.choice(("", " ", " ", " ", ", ", ". ", "'s ", "-")))
                case 1:
                    pieces.append(" ".join(draw.choices(words, k=4)))
                case 2:
                    pieces.append(draw.choice(CODE))
                case 3:
                    pieces.append(draw.choice(EMOJI))
                case 4:
                    pieces.append(draw.choice(BLANKS))
                case 5:
                    pieces.append(str(draw.randrange(10 ** draw.randint(1, 12))))
                case 6:
                    pieces.append(
                        "".join(
                            chr(draw.choice((draw.randrange(0x20, 0x3000), draw.randrange(0x20, 0x7F))))
                            for _ in range(6)
                        )
                    )
                case _:
                    pieces.append(draw.choice(controls) if controls else "<|x|>")
        text = "".join(pieces)[:1500]
        num_chars -= len(text)
        yield text


_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_metadata(path: Path) -> dict[str, Any]:
    """Read a trusted file's metadata. The `gguf` package's reader takes minutes for a tokenizer."""
    with path.open("rb") as file:

        def numbers(kind: str, count: int = 1) -> tuple[Any, ...]:
            layout = struct.Struct(f"<{count}{kind}")
            return layout.unpack(file.read(layout.size))

        def text() -> str:
            return file.read(numbers("Q")[0]).decode()

        def value(kind: int) -> Any:
            if kind == _STRING:
                return text()
            if kind != _ARRAY:
                return numbers(_NUMBERS[kind])[0]
            (element,), (count,) = numbers("I"), numbers("Q")
            return [text() for _ in range(count)] if element == _STRING else list(numbers(_NUMBERS[element], count))

        file.seek(16)
        (num_entries,) = numbers("Q")
        return {text(): value(numbers("I")[0]) for _ in range(num_entries)}


def write_vocabulary(path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a random Llama of one layer with the tokenizer of `metadata`, which llama.cpp can load."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (
        ("context_length", 64),
        ("embedding_length", 32),
        ("block_count", 1),
        ("feed_forward_length", 32),
    ):
        writer.add_uint32(f"llama.{key}", value)
    for key, value in (("attention.head_count", 1), ("attention.head_count_kv", 1)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    # llama.cpp recognises Phi-3 by its name.
    writer.add_name("phi-3" if metadata.get("general.architecture") == "phi3" else "a vocabulary")
    for key, value in metadata.items():
        if not key.startswith("tokenizer."):
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = {f"{name}.weight": np.ones(32, np.float32) for name in norms}
    tensors.update({f"blk.0.{name}.weight": np.zeros((32, 32), np.float16) for name in matrices})
    tensors["token_embd.weight"] = np.zeros((num_tokens, 32), np.float16)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
