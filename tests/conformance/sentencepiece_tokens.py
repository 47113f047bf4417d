"""Trains SentencePiece vocabularies and tokenizes texts with them. Runs in an environment that has `sentencepiece`.

Reads JSON from standard input, `{"corpus": [...], "texts": [...]}`. For each kind of vocabulary, it writes the
pieces and each text's token IDs.
"""

import io
import json
import sys
from collections.abc import Sequence
from typing import Any

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"remove_extra_whitespaces": False},
    "without a space before a text": {"remove_extra_whitespaces": False, "add_dummy_prefix": False},
    "without extra spaces": {"remove_extra_whitespaces": True},
}


def tokenized(settings: dict[str, Any], corpus: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=written,
        vocab_size=2000,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        character_coverage=0.98,
        minloglevel=2,
        **settings,
    )
    return answer(SentencePieceProcessor(model_proto=written.getvalue()), texts)


def answer(model: SentencePieceProcessor, texts: Sequence[str]) -> dict[str, Any]:
    ids = range(model.vocab_size())
    types = [
        2 if model.is_unknown(one) else 3 if model.is_control(one) else 6 if model.is_byte(one) else 1 for one in ids
    ]
    pieces, scores = [model.id_to_piece(one) for one in ids], [model.get_score(one) for one in ids]
    vocabulary = {"pieces": pieces, "scores": scores, "types": types}
    return {"vocabulary": vocabulary, "ids": [model.encode(text) for text in texts]}


if __name__ == "__main__":
    request = json.load(sys.stdin)
    found = {name: tokenized(kind, request["corpus"], request["texts"]) for name, kind in KINDS.items()}
    json.dump(found, sys.stdout)
