from __future__ import annotations

import json
import os
from importlib.metadata import version
from typing import Any

import cohere

KEY, LIMITED_KEY, MODEL = (os.environ[name] for name in ("CLIENT_KEY", "CLIENT_LIMITED_KEY", "CLIENT_MODEL"))
URL = os.environ["CLIENT_URL"].removesuffix("/v1")
TEXTS = ["What is the capital of France?", "Yes"]


def refusal(key: str, model: str) -> list[Any]:
    try:
        for _ in range(9):
            cohere.ClientV2(api_key=key, base_url=URL).embed(
                model=model, texts=TEXTS, input_type="clustering", request_options={"max_retries": 0}
            )
    except cohere.core.ApiError as error:
        return [type(error).__name__, error.status_code]
    return ["nothing was raised"]


def main() -> None:
    client, first = cohere.ClientV2(api_key=KEY, base_url=URL), cohere.Client(api_key=KEY, base_url=URL)
    typed = client.embed(
        model=MODEL, texts=TEXTS, input_type="search_query", embedding_types=["float", "base64"], truncate="START"
    )
    # The older client sends 96 texts per call.
    bare = first.embed(model=MODEL, texts=TEXTS * 50, input_type="search_document")
    short = client.embed(model=MODEL, texts=TEXTS, input_type="search_query", output_dimension=4)
    ranked = client.rerank(model=MODEL, query=TEXTS[0], documents=TEXTS[::-1], top_n=1)
    found = {
        "version": version("cohere"),
        "vectors": typed.embeddings.float_,
        "base64": typed.embeddings.base64,
        "tokens": typed.meta.billed_units.input_tokens,
        "vectors of version 1": bare.embeddings,
        "dimensions": [len(vector) for vector in short.embeddings.float_],
        "ranked": ranked.results[0].index,
        "errors": [refusal(KEY, "nothing"), refusal("wrong", MODEL), refusal(LIMITED_KEY, MODEL)],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
