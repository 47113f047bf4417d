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

from tests.conformance.sentencepiece_tokens import answer

DATA = Path(mistral_common.__file__).parent / "data"


def tekken(path: Path, texts: list[str]) -> dict[str, Any]:
    document = json.loads(path.read_text())
    tokenizer = Tekkenizer.from_file(path)
    num_special = tokenizer.num_special_tokens
    words = [entry["token_bytes"] for entry in document["vocab"][: tokenizer.n_words - num_special]]
    assert [base64.b64decode(word) for word in words[:256]] == [bytes([byte]) for byte in range(256)]
    special = [tokenizer.id_to_piece(token_id) for token_id in range(num_special)]
    ids = [tokenizer.encode(text, bos=False, eos=False) for text in texts]
    return {"vocabulary": {"special": special, "words": words}, "ids": ids}


def main() -> None:
    request = json.load(sys.stdin)
    path = DATA / request["file"]
    if path.suffix == ".json":
        found = tekken(path, request["texts"])
    else:
        found = answer(SentencePieceProcessor(model_file=str(path)), request["texts"])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
