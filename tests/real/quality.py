"""Perplexity of each format of weights on this project's documentation, and how far its predictions moved."""

from __future__ import annotations

import math
from collections.abc import Iterator

from loramux.engine.loop.config import EngineConfig
from loramux.engine.quantizing.quality import measure_quality
from tests.real.findings import Finding
from tests.real.models import FLOATS, FORMATS, RealModel
from tests.real.texts import long_text

NUM_TOKENS = 8192
WINDOW = 1024
MAX_DIFFERENCE = {"float32": 0.0, "gguf": 1e-3, "bfloat16": 0.05}
"""Largest difference of the mean log-probability from float32, in nats. Quantised weights have no limit here."""

NUM_COMPARED = 512
"""Number of tokens after which all probabilities are compared."""


def quality(model: RealModel, num_prompts: int) -> Iterator[Finding]:
    text = long_text(model, NUM_TOKENS)
    windows = [text[start : start + WINDOW] for start in range(0, NUM_TOKENS, WINDOW)]
    exact: float | None = None
    for kind in FORMATS:
        with model.open(kind) as llm:
            scores = llm.score(windows)
        nats = -sum(score.total for score in scores) / (NUM_TOKENS - len(windows))
        exact = nats if exact is None else exact
        figures = {"perplexity": round(math.exp(nats), 4), "nats_above_float32": round(nats - exact, 5)}
        if kind not in FLOATS:
            figures["kl_from_bfloat16"] = round(_divergence(model, kind, text), 5)
        limit = MAX_DIFFERENCE.get(kind, math.inf)
        problem = None if abs(nats - exact) <= limit else f"differs from float32 by more than {limit} nats"
        yield Finding(model=model.name, what=kind, figures=figures, problem=problem)


def _divergence(model: RealModel, method: str, text: list[int]) -> float:
    """Mean KL divergence of the next token's probabilities from those of bfloat16, over the text's first tokens."""
    config = EngineConfig(
        model_dir=str(model.directory),
        quantized_dir=str(model.quantized(method)),
        blob_url="",
        cache_dir="",
        dtype="bfloat16",
    )
    found = measure_quality(config, method, tuple(text[:NUM_COMPARED]))
    return math.nan if found is None else found.divergence
