"""Compare adapters of several ranks on a file of texts, one per line: lower perplexity is better.

python docs/examples/rank_sweep.py BASE TEXTS ADAPTER...
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from loramux.engine.llm import LLM

base, texts, *directories = sys.argv[1:]
lines = [line for line in Path(texts).read_text().splitlines() if line]
with LLM(base, {directory: directory for directory in directories}) as llm:
    for adapter in (None, *llm.adapters):
        scores = llm.score(lines, adapter=adapter)
        num_tokens = sum(len(score.token_ids) - 1 for score in scores)
        perplexity = math.exp(-sum(score.total for score in scores) / num_tokens)
        rank = "" if adapter is None else json.loads((Path(adapter) / "adapter_config.json").read_text())["r"]
        print(f"{adapter or 'base':24} rank {rank or '-':>4}  perplexity {perplexity:.3f}")
