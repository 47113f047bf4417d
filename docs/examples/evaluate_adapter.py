"""Count how many questions an adapter answers as expected.

python docs/examples/evaluate_adapter.py BASE ADAPTER QUESTIONS

QUESTIONS is a file with one JSON object per line: {"prompt": "...", "expected": "..."}. An answer counts if it contains
the expected text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from loramux.engine.llm import LLM, SamplingParams

base, adapter, questions = sys.argv[1:]
cases = [json.loads(line) for line in Path(questions).read_text().splitlines() if line]
chats = [[{"role": "user", "content": case["prompt"]}] for case in cases]
with LLM(base, {"adapter": adapter}) as llm:
    for name in (None, "adapter"):
        answers = llm.chat(chats, adapter=name, max_tokens=64, sampling=SamplingParams(temperature=0.0))
        num_right = sum(case["expected"] in answer.text for case, answer in zip(cases, answers, strict=True))
        print(f"{name or 'base'}: {num_right} of {len(cases)}")
