"""Tokenizes texts with Mistral's own tokenizers. Runs in an environment that has the `mistral-common` package.

Reads JSON from standard input, `{"file": NAME, "texts": [...]}`, and writes the vocabulary and each text's token IDs.
"""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import mistral_common
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from sentencepiece import SentencePieceProcessor

DATA = Path(mistral_common.__file__).parent / "data"


def tekken(path: Path, texts: list[str]) -> tuple[dict[str, Any], list[list[int]]]:
    document = json.loads(path.read_text())
    tokenizer = Tekkenizer.from_file(path)
    num_special = tokenizer.num_special_tokens
    words = [entry["token_bytes"] for entry in document["vocab"][: tokenizer.n_words - num_special]]
    assert [base64.b64decode(word) for word in words[:256]] == [bytes([byte]) for byte in range(256)]
    special = [tokenizer.id_to_piece(token_id) for token_id in range(num_special)]
    return {"special": special, "words": words}, [tokenizer.encode(text, bos=False, eos=False) for text in texts]


def sentencepiece(path: Path, texts: list[str]) -> tuple[dict[str, Any], list[list[int]]]:
    model = SentencePieceProcessor(model_file=str(path))
    ids = range(model.vocab_size())
    kinds = [
        2 if model.is_unknown(one) else 3 if model.is_control(one) else 6 if model.is_byte(one) else 1 for one in ids
    ]
    pieces, scores = [model.id_to_piece(one) for one in ids], [model.get_score(one) for one in ids]
    return {"pieces": pieces, "scores": scores, "types": kinds}, [model.encode(text) for text in texts]


def main() -> None:
    request = json.load(sys.stdin)
    path = DATA / request["file"]
    vocabulary, ids = (tekken if path.suffix == ".json" else sentencepiece)(path, request["texts"])
    json.dump({"vocabulary": vocabulary, "ids": ids}, sys.stdout)


if __name__ == "__main__":
    main()
